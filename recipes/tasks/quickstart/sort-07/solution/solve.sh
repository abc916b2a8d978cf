#!/bin/bash
sort list.txt > fin.txt
