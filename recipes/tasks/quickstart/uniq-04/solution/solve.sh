#!/bin/bash
sort -u names.txt > res.txt
