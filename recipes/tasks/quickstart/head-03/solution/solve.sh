#!/bin/bash
head -n 3 data.txt > log.txt
