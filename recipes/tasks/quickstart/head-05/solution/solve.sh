#!/bin/bash
head -n 5 data.txt > end.txt
