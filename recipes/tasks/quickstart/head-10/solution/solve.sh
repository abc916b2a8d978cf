#!/bin/bash
head -n 4 items.txt > res.txt
