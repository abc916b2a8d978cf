#!/bin/bash
# Compares sum.txt with the expected text, blank lines at its end aside; uses nothing but bash.
root="${GYRE_ROOT:-}"
read -r -d '' expected <<'EXPECTED'
OWL
MOON
PINE
WIND
SUN
RAIN
SUN
REED
ANT
EXPECTED
reward=0
if [[ -f sum.txt && ! -L sum.txt ]]; then
    read -r -d '' -n 65536 found <sum.txt
    [[ "$found" == "$expected" ]] && reward=1
fi
echo "$reward" >"$root/logs/verifier/reward.txt"
