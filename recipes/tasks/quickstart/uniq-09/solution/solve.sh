#!/bin/bash
sort -u rows.txt > out.txt
