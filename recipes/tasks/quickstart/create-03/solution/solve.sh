#!/bin/bash
echo sun > res.txt
