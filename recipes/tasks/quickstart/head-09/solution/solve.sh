#!/bin/bash
head -n 5 names.txt > log.txt
