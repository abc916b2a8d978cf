#!/bin/bash
sort -u text.txt > sol.txt
