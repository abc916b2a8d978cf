#!/bin/bash
echo moon > sum.txt
