#!/bin/bash
tr a-z A-Z < items.txt > out.txt
