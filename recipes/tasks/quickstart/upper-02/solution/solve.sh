#!/bin/bash
tr a-z A-Z < data.txt > sum.txt
