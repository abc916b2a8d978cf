#!/bin/bash
echo elm > sol.txt
