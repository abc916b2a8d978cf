"""A micro-step: the packed training input of one microbatch, as data.

Owns the in-memory form; `microstep_files.py` owns its Arrow file. Immutable once announced.
Invariant: every target names the sampled token it trains (execution, attempt, turn, position in the turn's output),
and no sampled token is a target twice in a run.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
UInt16 = npt.NDArray[np.uint16]


@dataclass(frozen=True)
class MicroStep:
    """T packed tokens, M targets, S samples.

    tokens, positions, segments: int32 (T,). `segments` numbers the runs of rows (0, 1, ...; -1 is padding).
    parents: int32, empty when every segment is a path of its own: positions restart at 0 with each. Else one a
    segment: the segment that it goes on from (-1 for a root), earlier in preorder, so that the rows of a segment
    and of all that descend from it are one range. A token sees the earlier ones of its own segment and all of that
    segment's ancestors; positions go on from the parent's last.
    target_rows: int32 (M,): the row whose hidden state predicts the target. target_tokens: int32 (M,).
    behaviour_logprobs: float32 (M,) as recorded, at temperature `temperatures[sample]`.
    target_samples: int32 (M,), index of the sample in this micro-step.
    target_turns, target_offsets: int32 (M,): provenance: turn number, and place in that turn's `output`.
    target_versions, target_lineages: int32 (M,): the weights that sampled the target.
    Per sample: executions (names), attempts, advantages, weights (L_j / sum L of the execution), temperatures,
    dispatch_versions: version that dispatched the group.
    experts: uint16 (T, layers, chosen), empty unless routing is replayed: the experts that the engine chose for each
    row; `NO_EXPERTS` where that is not recorded.
    """

    step: int
    tokens: Int32
    positions: Int32
    segments: Int32
    target_rows: Int32
    target_tokens: Int32
    behaviour_logprobs: Float32
    target_samples: Int32
    target_turns: Int32
    target_offsets: Int32
    target_versions: Int32
    target_lineages: Int32
    executions: tuple[str, ...]
    attempts: Int32
    advantages: Float32
    weights: Float32
    temperatures: Float32
    dispatch_versions: Int32
    parents: Int32 = field(default_factory=lambda: np.zeros(0, np.int32))
    experts: UInt16 = field(default_factory=lambda: np.zeros((0, 0, 0), np.uint16))

    @property
    def targets(self) -> int:
        return len(self.target_rows)
