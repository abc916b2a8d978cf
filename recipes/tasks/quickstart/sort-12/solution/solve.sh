#!/bin/bash
sort text.txt > sol.txt
