#!/bin/bash
head -n 3 text.txt > end.txt
