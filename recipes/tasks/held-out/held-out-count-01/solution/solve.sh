#!/bin/bash
wc -l < data.txt > sum.txt
