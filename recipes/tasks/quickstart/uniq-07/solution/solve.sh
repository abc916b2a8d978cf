#!/bin/bash
sort -u data.txt > fin.txt
