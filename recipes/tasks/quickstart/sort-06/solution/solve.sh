#!/bin/bash
sort data.txt > res.txt
