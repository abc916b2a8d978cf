#!/bin/bash
sort rows.txt > fin.txt
