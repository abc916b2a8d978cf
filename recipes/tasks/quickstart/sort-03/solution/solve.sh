#!/bin/bash
sort items.txt > res.txt
