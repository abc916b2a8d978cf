"""The leaves that are worth drawing.

Owns the rule that one conversation is one candidate. Invariant: the possible targets of all tips together are
the possible targets of the tips returned.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

from gyre.ledger.turns import ROOT
from gyre.trajectory.targets import Targets
from gyre.trajectory.tree import Tree

Place = tuple[int, int]
"""(turn, stop): the end of the first `stop` tokens of that turn's output."""


def own_tips(tree: Tree, targets: dict[int, Targets]) -> list[int]:
    """The tips, ascending, whose leaf holds a possible target that no other leaf holds; of leaves with equal
    targets the first counts.

    A tip without targets of its own (an auxiliary call on top of the conversation, a reply that was lost and
    asked for again) stands for targets which the leaf that went on holds too. In a draw it would take their
    path and split one conversation over several samples.
    """
    last = last_targets(tree, targets)
    ends: dict[Place, list[int]] = {}
    for tip in tree.tips:
        place = last[tip]
        if place is not None:
            ends.setdefault(place, []).append(tip)
    leaves = _LeafCounts(tree)
    return sorted(tips[0] for place, tips in ends.items() if leaves.through(place) == len(tips))


def last_targets(tree: Tree, targets: dict[int, Targets]) -> dict[int, Place | None]:
    """For every turn the place of the last possible target on its whole sequence."""
    before: dict[int, Place | None] = {}
    last: dict[int, Place | None] = {}
    for number, node in tree.nodes.items():
        place = None
        if node.parent != ROOT:
            above = targets.get(node.parent)
            stop = above.upto(tree.nodes[node.parent], node.keep) if above else 0
            place = (node.parent, stop) if above and stop > above.first else before[node.parent]
        before[number] = place
        own = targets.get(number)
        last[number] = (number, own.stop) if own else place
    return last


class _LeafCounts:
    """How many leaves pass through a place: one pass over the turns, then a bisection for each question."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        leaves = {number: int(not node.kept_whole) for number, node in tree.nodes.items()}
        forks: dict[int, list[tuple[int, int]]] = {}
        for number in reversed(tree.nodes):  # children first
            node = tree.nodes[number]
            if node.parent != ROOT:
                leaves[node.parent] += leaves[number]
                forks.setdefault(node.parent, []).append((node.keep, leaves[number]))
        self._keeps: dict[int, list[int]] = {}
        self._sums: dict[int, list[int]] = {}
        for number, children in forks.items():
            children.sort()
            self._keeps[number] = [keep for keep, _ in children]
            self._sums[number] = [0, *accumulate(count for _, count in children)]

    def through(self, place: Place) -> int:
        turn, stop = place
        node = self._tree.nodes[turn]
        count = int(not node.kept_whole)
        if turn in self._keeps:
            sums = self._sums[turn]
            count += sums[-1] - sums[bisect_left(self._keeps[turn], node.output_start + stop)]
        return count
