#!/bin/bash
sort -u rows.txt > sol.txt
