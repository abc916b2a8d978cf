#!/bin/bash
sort data.txt > log.txt
