#!/bin/bash
head -n 4 text.txt > ans.txt
