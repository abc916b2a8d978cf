#!/bin/bash
tr a-z A-Z < list.txt > sum.txt
