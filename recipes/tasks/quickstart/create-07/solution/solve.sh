#!/bin/bash
echo blue > out.txt
