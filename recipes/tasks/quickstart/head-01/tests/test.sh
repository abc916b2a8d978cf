#!/bin/bash
# Compares end.txt with the expected text, blank lines at its end aside; uses nothing but bash.
root="${GYRE_ROOT:-}"
read -r -d '' expected <<'EXPECTED'
ant
bee
fern
EXPECTED
reward=0
if [[ -f end.txt && ! -L end.txt ]]; then
    read -r -d '' -n 65536 found <end.txt
    [[ "$found" == "$expected" ]] && reward=1
fi
echo "$reward" >"$root/logs/verifier/reward.txt"
