#!/bin/bash
wc -l < list.txt > log.txt
