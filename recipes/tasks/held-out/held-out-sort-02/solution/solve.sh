#!/bin/bash
sort rows.txt > sol.txt
