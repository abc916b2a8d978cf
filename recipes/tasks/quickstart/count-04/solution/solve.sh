#!/bin/bash
wc -l < list.txt > res.txt
