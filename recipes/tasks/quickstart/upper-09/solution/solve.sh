#!/bin/bash
tr a-z A-Z < data.txt > log.txt
