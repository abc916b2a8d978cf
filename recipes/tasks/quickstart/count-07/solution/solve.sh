#!/bin/bash
wc -l < items.txt > fin.txt
