"""Which leaves of an execution are trained, at most `max_paths` of them.

Owns the draw (DESIGN section 8, after bounded sampling in arXiv 2609.33848). Invariant: a target belongs to
the first path drawn that passes through it, so it is taken once at most; the draw depends on (seed,
execution, attempt) and the tree alone.

Every path takes a beginning of each turn's output, so what is masked is one number a turn, and a draw costs
one pass over the turns, however long their paths are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gyre.ledger.turns import ROLES, ROOT
from gyre.trajectory.candidates import own_tips
from gyre.trajectory.targets import Targets
from gyre.trajectory.tree import Tree

CLASS = {role: rank for rank, role in enumerate(ROLES)}
"""main 0 (highest), main-summary 1, sub-agent 2, sub-agent-summary 3, auxiliary 4."""
NO_CLASS = len(CLASS)


@dataclass(frozen=True, slots=True)
class Piece:
    """Offsets start <= offset < stop of the output of `turn`."""

    turn: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Choice:
    """A selected path: the leaf that ends in turn `tip`, and the targets that it takes, root first, never none."""

    tip: int
    pieces: tuple[Piece, ...]

    @property
    def targets(self) -> int:
        return sum(piece.stop - piece.start for piece in self.pieces)


def select_paths(
    tree: Tree,
    targets: dict[int, Targets],
    *,
    seed: int,
    max_paths: int = 5,
    min_targets: int = 1,
    selection: Literal["default", "paper"] = "default",
) -> list[Choice]:
    """At most `max_paths` paths with the targets that each takes, in the order of the draws.

    `default`: the candidates are `own_tips`; a leaf's class is the highest class among its unmasked targets.
    `paper`: every tip is a candidate; its class is its last turn's own role.
    Leaves with fewer than `min_targets` unmasked targets come last; within the best class a leaf is drawn in
    proportion to its unmasked targets.
    """
    candidates = tree.tips if selection == "paper" else own_tips(tree, targets)
    masked = {turn: possible.first for turn, possible in targets.items()}
    choices: list[Choice] = []
    while len(choices) < max_paths:
        unmasked = _unmasked(tree, targets, masked)
        best: tuple[bool, int] | None = None
        drawn: list[int] = []
        for tip in candidates:
            count, rank = unmasked[tip]
            if not count:
                continue
            if selection == "paper":
                rank = CLASS[tree.nodes[tip].turn.role]
            order = (count < min_targets, rank)
            if best is None or order < best:
                best, drawn = order, []
            if order == best:
                drawn.append(tip)
        if not drawn:
            break
        counts = [unmasked[tip][0] for tip in drawn]
        tip = drawn[draw(counts, seed, tree.execution, tree.attempt, len(choices))]
        choices.append(_take(tree, targets, masked, tip))
    return choices


def draw(weights: Sequence[int], seed: int, execution: str, attempt: int, counter: int) -> int:
    """An index into `weights`, drawn in proportion to them; a pure function of the other arguments.

    The address is hashed to 128 bits (BLAKE2b), which are scaled to the total; the bias is below total /
    2**128.
    """
    address = f"gyre.selection/{seed}/{attempt}/{counter}/{execution}".encode()
    bits = int.from_bytes(hashlib.blake2b(address, digest_size=16).digest(), "big")
    place = (bits * sum(weights)) >> 128
    for index, weight in enumerate(weights):
        place -= weight
        if place < 0:
            return index
    raise ValueError("nothing to draw from: the weights sum to zero")


def _unmasked(tree: Tree, targets: dict[int, Targets], masked: dict[int, int]) -> dict[int, tuple[int, int]]:
    """For every turn: how many unmasked targets its whole sequence holds, and their highest class (`NO_CLASS`)."""
    before: dict[int, tuple[int, int]] = {ROOT: (0, NO_CLASS)}
    whole: dict[int, tuple[int, int]] = {}
    for number, node in tree.nodes.items():
        before[number] = before[node.parent]
        if node.parent in targets:
            above = tree.nodes[node.parent]
            kept = targets[node.parent].upto(above, node.keep) - masked[node.parent]
            before[number] = _add(before[node.parent], kept, above.turn.role)
        own = targets[number].stop - masked[number] if number in targets else 0
        whole[number] = _add(before[number], own, node.turn.role)
    return whole


def _add(total: tuple[int, int], count: int, role: str) -> tuple[int, int]:
    return (total[0] + count, min(total[1], CLASS[role])) if count > 0 else total


def _take(tree: Tree, targets: dict[int, Targets], masked: dict[int, int], tip: int) -> Choice:
    """Mask the targets of the path of `tip`; returns those that were not masked before."""
    pieces = []
    for number, end in tree.path(tip):
        if number not in targets:
            continue
        stop = targets[number].upto(tree.nodes[number], end)
        if stop > masked[number]:
            pieces.append(Piece(number, masked[number], stop))
            masked[number] = stop
    return Choice(tip, tuple(pieces))
