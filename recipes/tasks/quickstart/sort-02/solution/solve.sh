#!/bin/bash
sort items.txt > end.txt
