#!/bin/bash
wc -l < text.txt > log.txt
