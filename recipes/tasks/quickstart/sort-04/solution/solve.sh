#!/bin/bash
sort items.txt > sum.txt
