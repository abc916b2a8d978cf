#!/bin/bash
head -n 5 items.txt > out.txt
