#!/bin/bash
head -n 2 text.txt > sum.txt
