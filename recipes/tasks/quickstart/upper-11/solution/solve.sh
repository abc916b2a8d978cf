#!/bin/bash
tr a-z A-Z < rows.txt > sol.txt
