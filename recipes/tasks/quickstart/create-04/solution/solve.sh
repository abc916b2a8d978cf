#!/bin/bash
echo pink > end.txt
