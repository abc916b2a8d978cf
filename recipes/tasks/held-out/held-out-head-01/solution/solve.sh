#!/bin/bash
head -n 2 text.txt > end.txt
