#!/bin/bash
sort -u data.txt > out.txt
