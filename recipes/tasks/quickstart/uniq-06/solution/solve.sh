#!/bin/bash
sort -u items.txt > ans.txt
