"""From blocks to the arrays of a micro-step.

Owns the rows of a tree. Invariant: the hidden state of a row depends on exactly the tokens that precede it on every
path through it, so it is the same row for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gyre.ledger.microsteps import MicroStep
from gyre.trajectory.blocks import Block
from gyre.trajectory.experts import stacked

Int32 = npt.NDArray[np.int32]


def lay_out(step: int, blocks: Sequence[Block]) -> MicroStep:
    """One or more blocks side by side, without padding; where no path shares anything, segment s is sample s."""
    samples = [sample for block in blocks for sample in block.samples]
    shared = [count for block in blocks for count in block.shared]
    rows, forks = _rows([len(sample.tokens) for sample in samples], shared)
    lengths = [len(sample.tokens) - count for sample, count in zip(samples, shared, strict=True)]
    segments, parents = _segments(lengths, forks)
    each = list(zip(samples, shared, strict=True))
    return MicroStep(
        step=step,
        tokens=np.concatenate([sample.tokens[count:] for sample, count in each]),
        positions=np.concatenate([np.arange(count, len(sample.tokens), dtype=np.int32) for sample, count in each]),
        segments=segments,
        target_rows=np.concatenate([own[s.target_rows] for own, s in zip(rows, samples, strict=True)]),
        target_tokens=np.concatenate([sample.target_tokens for sample in samples]),
        behaviour_logprobs=np.concatenate([sample.behaviour_logprobs for sample in samples]),
        target_samples=np.repeat(np.arange(len(samples), dtype=np.int32), [sample.targets for sample in samples]),
        target_turns=np.concatenate([sample.target_turns for sample in samples]),
        target_offsets=np.concatenate([sample.target_offsets for sample in samples]),
        target_versions=np.concatenate([sample.target_versions for sample in samples]),
        target_lineages=np.concatenate([sample.target_lineages for sample in samples]),
        executions=tuple(sample.execution for sample in samples),
        attempts=np.array([sample.attempt for sample in samples], dtype=np.int32),
        advantages=np.array([sample.advantage for sample in samples], dtype=np.float32),
        weights=np.array([sample.weight for sample in samples], dtype=np.float32),
        temperatures=np.array([sample.temperature for sample in samples], dtype=np.float32),
        dispatch_versions=np.array([sample.dispatch_version for sample in samples], dtype=np.int32),
        parents=parents,
        experts=stacked([s.experts if s.experts is None else s.experts[count:] for s, count in each], lengths),
    )


def _rows(sizes: list[int], shared: list[int]) -> tuple[list[Int32], list[int]]:
    """For each sample the row of each of its tokens, and the row that its own first token goes on from (-1: none)."""
    rows: list[Int32] = []
    forks: list[int] = []
    free = 0
    for size, count in zip(sizes, shared, strict=True):
        own = np.arange(free, free + size - count, dtype=np.int32)
        rows.append(np.concatenate([rows[-1][:count], own]) if count else own)
        forks.append(int(rows[-1][count - 1]) if count else -1)
        free += size - count
    return rows, forks


def _segments(lengths: list[int], forks: list[int]) -> tuple[Int32, Int32]:
    """The segment of each row, and the parent of each segment (empty when none has one). A segment ends where its
    sample's own rows end, and where another sample forks off."""
    starts = np.cumsum([0, *lengths])
    above = dict(zip(starts.tolist(), forks, strict=False))
    inner = {fork + 1 for fork in forks if fork >= 0} - {int(starts[-1])}
    edges = sorted(inner | {start for start in above if start < starts[-1]})
    segments = np.repeat(np.arange(len(edges), dtype=np.int32), np.diff([*edges, int(starts[-1])]))
    if max(forks) < 0:
        return segments, np.zeros(0, np.int32)
    before = [above.get(edge, edge - 1) for edge in edges]
    return segments, np.array([segments[row] if row >= 0 else -1 for row in before], dtype=np.int32)
