#!/bin/bash
echo cat > sol.txt
