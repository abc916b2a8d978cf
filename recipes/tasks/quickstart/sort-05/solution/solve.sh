#!/bin/bash
sort data.txt > end.txt
