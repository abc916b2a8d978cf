#!/bin/bash
sort -u rows.txt > log.txt
