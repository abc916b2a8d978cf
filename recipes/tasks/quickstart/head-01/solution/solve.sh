#!/bin/bash
head -n 3 list.txt > end.txt
