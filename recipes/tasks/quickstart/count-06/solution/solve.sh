#!/bin/bash
wc -l < rows.txt > out.txt
