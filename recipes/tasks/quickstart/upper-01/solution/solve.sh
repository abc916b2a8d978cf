#!/bin/bash
tr a-z A-Z < text.txt > out.txt
