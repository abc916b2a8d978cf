#!/bin/bash
wc -l < text.txt > ans.txt
