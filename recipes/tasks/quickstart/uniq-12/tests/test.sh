#!/bin/bash
# Compares ans.txt with the expected text, blank lines at its end aside; uses nothing but bash.
root="${GYRE_ROOT:-}"
read -r -d '' expected <<'EXPECTED'
gold
green
oak
pink
red
EXPECTED
reward=0
if [[ -f ans.txt && ! -L ans.txt ]]; then
    read -r -d '' -n 65536 found <ans.txt
    [[ "$found" == "$expected" ]] && reward=1
fi
echo "$reward" >"$root/logs/verifier/reward.txt"
