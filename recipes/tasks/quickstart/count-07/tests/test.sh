#!/bin/bash
# Compares fin.txt with the expected text, blank lines at its end aside; uses nothing but bash.
root="${GYRE_ROOT:-}"
read -r -d '' expected <<'EXPECTED'
7
EXPECTED
reward=0
if [[ -f fin.txt && ! -L fin.txt ]]; then
    read -r -d '' -n 65536 found <fin.txt
    [[ "$found" == "$expected" ]] && reward=1
fi
echo "$reward" >"$root/logs/verifier/reward.txt"
