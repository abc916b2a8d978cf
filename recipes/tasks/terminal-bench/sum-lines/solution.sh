#!/bin/bash
awk '{ total += $1 } END { print total }' numbers.txt > sum.txt
