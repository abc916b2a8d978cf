"""Blocks: samples that are laid out together, with what they share laid out once.

Owns the order of paths within a tree, and where a tree that is too big is cut. Invariants: a block's tokens are the
unique tokens of its paths; a path is in one block, whole, so all targets of a sample are in one micro-step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from gyre.trajectory.samples import Sample


@dataclass(slots=True)
class Block:
    """Samples in preorder of their tree; `shared[i]` leading tokens of sample i are those of sample i - 1.

    In preorder nothing else of a sample is on any earlier path, so these numbers are the whole tree.
    """

    samples: list[Sample]
    shared: list[int]
    tokens: int


def blocks_of(samples: Iterable[Sample], packing: Literal["paths", "tree"], bound: int) -> list[Block]:
    """The blocks of at most `bound` tokens, in the order of the executions.

    `paths`: a block a sample. `tree`: a block an execution, and more only where its tree exceeds `bound`: it is cut
    between paths that are neighbours in preorder, which share the most. Raises `ValueError` for a single path over
    the bound (selection never makes one).
    """
    blocks: list[Block] = []
    for _, group in groupby(samples, key=lambda sample: (sample.execution, sample.attempt)):
        first = True
        for sample in sorted(group, key=lambda sample: sample.path) if packing == "tree" else group:
            size = len(sample.tokens)
            if size > bound:
                raise ValueError(
                    f"a path of execution {sample.execution} has {size} tokens, over the {bound} of a micro-step"
                )
            shared = 0 if first else common_tokens(blocks[-1].samples[-1], sample)
            if first or packing == "paths" or blocks[-1].tokens + size - shared > bound:
                blocks.append(Block([sample], [0], size))
            else:
                blocks[-1].samples.append(sample)
                blocks[-1].shared.append(shared)
                blocks[-1].tokens += size - shared
            first = False
    return blocks


def common_tokens(one: Sample, other: Sample) -> int:
    """How many leading tokens two samples of one attempt have in common: the same tokens of the same turns."""
    common = 0
    for (turn, end), (other_turn, other_end) in zip(one.path, other.path, strict=False):
        if turn != other_turn:
            break
        common = min(end, other_end)
        if end != other_end:
            break
    return common
