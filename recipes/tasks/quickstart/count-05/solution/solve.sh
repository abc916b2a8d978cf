#!/bin/bash
wc -l < text.txt > out.txt
