#!/bin/bash
wc -l < items.txt > out.txt
