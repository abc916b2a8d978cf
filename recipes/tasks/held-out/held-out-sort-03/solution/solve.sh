#!/bin/bash
sort rows.txt > log.txt
