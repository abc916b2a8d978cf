#!/bin/bash
echo fox > ans.txt
