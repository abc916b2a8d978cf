#!/bin/bash
sort text.txt > out.txt
