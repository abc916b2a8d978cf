#!/bin/bash
wc -l < names.txt > res.txt
