#!/bin/bash
sort -u rows.txt > ans.txt
