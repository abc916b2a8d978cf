#!/bin/bash
echo sun > sol.txt
