#!/bin/bash
wc -l < names.txt > out.txt
