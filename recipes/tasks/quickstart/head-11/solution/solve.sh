#!/bin/bash
head -n 5 rows.txt > log.txt
