#!/bin/bash
head -n 2 data.txt > sol.txt
