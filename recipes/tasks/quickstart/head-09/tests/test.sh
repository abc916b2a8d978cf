#!/bin/bash
# Compares log.txt with the expected text, blank lines at its end aside; uses nothing but bash.
root="${GYRE_ROOT:-}"
read -r -d '' expected <<'EXPECTED'
moss
ant
fig
iron
rain
EXPECTED
reward=0
if [[ -f log.txt && ! -L log.txt ]]; then
    read -r -d '' -n 65536 found <log.txt
    [[ "$found" == "$expected" ]] && reward=1
fi
echo "$reward" >"$root/logs/verifier/reward.txt"
