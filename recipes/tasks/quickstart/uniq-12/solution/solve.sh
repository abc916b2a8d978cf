#!/bin/bash
sort -u text.txt > ans.txt
