#!/bin/bash
sort text.txt > res.txt
