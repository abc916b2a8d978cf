#!/bin/bash
wc -l < text.txt > fin.txt
