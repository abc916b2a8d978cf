#!/bin/bash
sort -u names.txt > sum.txt
