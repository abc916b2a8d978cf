#!/bin/bash
wc -l < names.txt > sol.txt
