#!/bin/bash
echo gold > fin.txt
