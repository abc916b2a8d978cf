# expect NUMBER: the reward is 1 when count.txt holds NUMBER and stock.txt has as many lines; nothing but bash.
expect() {
    local reward=0 found="" lines=()
    [[ -f count.txt && ! -L count.txt ]] && read -r -n 64 found <count.txt
    [[ -f stock.txt && ! -L stock.txt ]] && mapfile -n 1000 -t lines <stock.txt
    [[ "$found" == "$1" && ${#lines[@]} == "$1" ]] && reward=1
    echo "$reward" >"${GYRE_ROOT:-}/logs/verifier/reward.txt"
}
