#!/bin/bash
# Compares out.txt with the expected text, blank lines at its end aside; uses nothing but bash.
root="${GYRE_ROOT:-}"
read -r -d '' expected <<'EXPECTED'
fig
EXPECTED
reward=0
if [[ -f out.txt && ! -L out.txt ]]; then
    read -r -d '' -n 65536 found <out.txt
    [[ "$found" == "$expected" ]] && reward=1
fi
echo "$reward" >"$root/logs/verifier/reward.txt"
