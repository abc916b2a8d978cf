"""The token tree of one attempt of one execution.

Owns the whole sequence of a turn: its parent's whole sequence cut to `keep`, then its own context and output.
Invariant: a tree holds each token once, and each sampled token lies on the path of at least one tip, because
a turn stops being a tip only when a later turn keeps its whole sequence. Building costs the new tokens; only
`whole` materialises a path.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from gyre.ledger.turns import ROLES, ROOT, STATUSES, Turn

Int32 = npt.NDArray[np.int32]


class TrajectoryError(ValueError):
    """Recorded turns that contradict each other: a defect of the writer, never of the user."""

    def __init__(self, execution: str, attempt: int, turn: int | None, problem: str) -> None:
        place = "" if turn is None else f", turn {turn}"
        super().__init__(f"execution {execution}, attempt {attempt}{place}: {problem}")
        self.execution = execution
        self.attempt = attempt
        self.turn = turn


@dataclass(slots=True)
class Node:
    """A turn in its tree. Positions count tokens of the whole sequence, from 0.

    parent: the deepest turn that owns a token before position `keep`, or -1; it may be an ancestor of the
    recorded parent when `keep` reaches into that ancestor only. own: int32 (length - keep,), context then
    output. The output begins at `output_start`. kept_whole: a later turn keeps the whole sequence.
    """

    turn: Turn
    parent: int
    keep: int
    own: Int32
    output_start: int
    length: int
    kept_whole: bool = False

    @property
    def sampled(self) -> int:
        return self.length - self.output_start


class Tree:
    """`nodes` maps turn numbers to nodes, parents first. Numbers may have gaps (calls that were never recorded)."""

    def __init__(self, execution: str, attempt: int, turns: Iterable[Turn]) -> None:
        """Raises `TrajectoryError` when the turns are of another attempt, repeat, or do not fit together."""
        self.execution = execution
        self.attempt = attempt
        self.nodes: dict[int, Node] = {}
        for turn in sorted(turns, key=lambda turn: turn.turn):
            self._add(turn)

    @property
    def tips(self) -> list[int]:
        """Turns that end a leaf, ascending: no later turn keeps their whole sequence."""
        return [number for number, node in self.nodes.items() if not node.kept_whole]

    def whole(self, turn: int, end: int | None = None) -> Int32:
        """The first `end` tokens (all by default) of the whole sequence of `turn`: int32 (end,)."""
        stop = self.nodes[turn].length if end is None else end
        tokens = np.empty(stop, dtype=np.int32)
        for number, limit in self._upwards(turn, stop):
            node = self.nodes[number]
            tokens[node.keep : limit] = node.own[: limit - node.keep]
        return tokens

    def path(self, turn: int, end: int | None = None) -> list[tuple[int, int]]:
        """The turns that own the first `end` tokens (all by default) of the whole sequence of `turn`, root first,
        each with the position where its own tokens on this path end."""
        return list(self._upwards(turn, self.nodes[turn].length if end is None else end))[::-1]

    def _upwards(self, turn: int, stop: int) -> Iterator[tuple[int, int]]:
        while turn != ROOT:
            node = self.nodes[turn]
            if stop > node.keep:
                yield turn, stop
                stop = node.keep
            turn = node.parent

    def _add(self, turn: Turn) -> None:
        self._check(turn)
        parent, keep = turn.parent, turn.keep
        while parent != ROOT:
            above = self.nodes[parent]
            above.kept_whole |= keep == above.length
            if keep > above.keep:
                break
            parent = above.parent
        own = self._array(turn)
        output_start = keep + len(turn.context)
        self.nodes[turn.turn] = Node(turn, parent, keep, own, output_start, keep + len(own))

    def _check(self, turn: Turn) -> None:
        if (turn.execution, turn.attempt) != (self.execution, self.attempt):
            self._refuse(turn, f"belongs to execution {turn.execution}, attempt {turn.attempt}")
        if turn.turn < 0 or turn.turn in self.nodes:
            self._refuse(turn, "is recorded twice" if turn.turn in self.nodes else "has a negative number")
        if turn.role not in ROLES or turn.status not in STATUSES:
            self._refuse(turn, f"has an unknown role or status ({turn.role}, {turn.status})")
        if turn.parent == ROOT:
            if turn.keep != 0:
                self._refuse(turn, f"is a root but keeps {turn.keep} tokens")
        elif turn.parent not in self.nodes:
            self._refuse(turn, f"its parent {turn.parent} is not an earlier turn")
        elif not 0 <= turn.keep <= self.nodes[turn.parent].length:
            length = self.nodes[turn.parent].length
            self._refuse(turn, f"keeps {turn.keep} of the {length} tokens of its parent {turn.parent}")
        self._check_output(turn)

    def _check_output(self, turn: Turn) -> None:
        sampled, spans = len(turn.output), [span.length for span in turn.spans]
        if len(turn.logprobs) != sampled:
            self._refuse(turn, f"has {len(turn.logprobs)} log-probabilities for {sampled} sampled tokens")
        if sum(spans) != sampled or min(spans, default=0) < 0:
            self._refuse(turn, f"its version spans {spans} do not cover {sampled} sampled tokens")
        if not all(map(math.isfinite, turn.logprobs)):
            self._refuse(turn, "has a log-probability that is not finite")

    def _array(self, turn: Turn) -> Int32:
        try:
            own = np.array(turn.context + turn.output, dtype=np.int32)
        except OverflowError:
            self._refuse(turn, "has a token id over 32 bits")
        if len(own) and own.min() < 0:
            self._refuse(turn, "has a negative token id")
        return own

    def _refuse(self, turn: Turn, problem: str) -> NoReturn:
        raise TrajectoryError(self.execution, self.attempt, turn.turn, problem)
