#!/bin/bash
echo plum > log.txt
