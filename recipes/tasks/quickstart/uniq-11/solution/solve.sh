#!/bin/bash
sort -u rows.txt > res.txt
