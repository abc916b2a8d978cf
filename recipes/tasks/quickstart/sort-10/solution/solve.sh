#!/bin/bash
sort data.txt > sol.txt
