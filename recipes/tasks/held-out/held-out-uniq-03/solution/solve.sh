#!/bin/bash
sort -u text.txt > end.txt
