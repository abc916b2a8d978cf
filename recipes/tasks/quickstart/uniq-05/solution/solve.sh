#!/bin/bash
sort -u text.txt > fin.txt
