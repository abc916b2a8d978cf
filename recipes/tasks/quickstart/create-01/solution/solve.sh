#!/bin/bash
echo fig > out.txt
