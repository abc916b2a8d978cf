#!/bin/bash
wc -l < names.txt > end.txt
