#!/bin/bash
# Compares sol.txt with the expected text, blank lines at its end aside; uses nothing but bash.
root="${GYRE_ROOT:-}"
read -r -d '' expected <<'EXPECTED'
zinc
plum
EXPECTED
reward=0
if [[ -f sol.txt && ! -L sol.txt ]]; then
    read -r -d '' -n 65536 found <sol.txt
    [[ "$found" == "$expected" ]] && reward=1
fi
echo "$reward" >"$root/logs/verifier/reward.txt"
