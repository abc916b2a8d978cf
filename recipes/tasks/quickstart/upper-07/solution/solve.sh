#!/bin/bash
tr a-z A-Z < text.txt > log.txt
