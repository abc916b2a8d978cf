#!/bin/bash
tr a-z A-Z < names.txt > fin.txt
