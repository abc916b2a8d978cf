#!/bin/bash
echo fox > out.txt
