#!/bin/bash
sort text.txt > fin.txt
