#!/bin/bash
source "${BASH_SOURCE%/*}/expect.sh"
expect 7
