#!/bin/bash
sort -u list.txt > ans.txt
