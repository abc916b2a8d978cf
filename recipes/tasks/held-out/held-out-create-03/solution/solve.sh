#!/bin/bash
echo pink > res.txt
