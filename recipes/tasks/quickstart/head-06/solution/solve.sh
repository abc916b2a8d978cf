#!/bin/bash
head -n 5 items.txt > log.txt
