#!/bin/bash
head -n 5 data.txt > fin.txt
