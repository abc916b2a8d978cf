#!/bin/bash
echo lead > sol.txt
