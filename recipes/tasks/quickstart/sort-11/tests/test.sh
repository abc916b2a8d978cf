#!/bin/bash
# Compares res.txt with the expected text, blank lines at its end aside; uses nothing but bash.
root="${GYRE_ROOT:-}"
read -r -d '' expected <<'EXPECTED'
apple
elm
iron
lead
moon
plum
reed
sun
EXPECTED
reward=0
if [[ -f res.txt && ! -L res.txt ]]; then
    read -r -d '' -n 65536 found <res.txt
    [[ "$found" == "$expected" ]] && reward=1
fi
echo "$reward" >"$root/logs/verifier/reward.txt"
