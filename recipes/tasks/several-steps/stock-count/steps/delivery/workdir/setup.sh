# The stock must be there to be brought up to date. The script goes: it is of no use to the agent.
test -f stock.txt && rm -- "$0"
