#!/bin/bash
echo star > sol.txt
