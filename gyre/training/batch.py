"""A micro-step as tensors on this rank's device.

Owns the step from the ledger's arrays to what the model takes. Invariant: a batch that is built is
consistent: rows and samples are in range, segments are contiguous, parents are in preorder, padding is at the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from gyre.ledger.routing import NO_EXPERTS, Mixture
from gyre.training.attention import Packing

if TYPE_CHECKING:
    from gyre.ledger.microsteps import MicroStep

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class MicroStepBatch:
    """T packed tokens, M targets, S samples: what the trainer reads of a micro-step.

    tokens, positions, segments: int32 (T,); segments number the runs of rows 0, 1, ...; -1 is padding, at the end
    only. parents: int32, empty, or of each segment the one that it goes on from (-1: none). target_rows,
    target_tokens, samples: int32 (M,): the row whose hidden state predicts the target, the target, its sample.
    behaviour_logprobs: float32 (M,), as recorded at the sample's temperature. advantages, weights, temperatures:
    float32 (S,); weight = L_j / sum L within the execution, zero for padding.
    """

    tokens: Int32
    positions: Int32
    segments: Int32
    target_rows: Int32
    target_tokens: Int32
    behaviour_logprobs: Float32
    samples: Int32
    advantages: Float32
    weights: Float32
    temperatures: Float32
    comparable: npt.NDArray[np.bool_] | None = None
    """(M,): targets that the present weights sampled, the only ones for which trainer and engine should
    agree. None: all of them."""
    parents: Int32 = field(default_factory=lambda: np.zeros(0, np.int32))
    experts: npt.NDArray[np.uint16] = field(default_factory=lambda: np.zeros((0, 0, 0), np.uint16))
    """(T, layers, chosen), or empty: the experts that each row is to go to; `NO_EXPERTS`: those that the router
    chooses."""

    @classmethod
    def of(cls, microstep: MicroStep, weights: tuple[int, int] | None = None) -> MicroStepBatch:
        """The trained part of a micro-step file; provenance stays in the ledger. `weights`: (lineage,
        version) that the trainer holds, when it is a published one."""
        comparable = np.zeros(microstep.targets, dtype=bool)
        if weights is not None:
            lineage, version = weights
            comparable = (microstep.target_lineages == lineage) & (microstep.target_versions == version)
        return cls(
            tokens=microstep.tokens,
            positions=microstep.positions,
            segments=microstep.segments,
            target_rows=microstep.target_rows,
            target_tokens=microstep.target_tokens,
            behaviour_logprobs=microstep.behaviour_logprobs,
            samples=microstep.target_samples,
            advantages=microstep.advantages,
            weights=microstep.weights,
            temperatures=microstep.temperatures,
            comparable=comparable,
            parents=microstep.parents,
            experts=microstep.experts,
        )

    def check(self, vocab: int, mixture: Mixture | None = None) -> None:
        """ValueError when an index is out of range: a damaged or foreign micro-step must not train
        anything. `mixture`: the model's, which has experts."""
        rows, count = len(self.tokens), len(self.advantages)
        ranges = {
            "tokens": (self.tokens, vocab),
            "target_tokens": (self.target_tokens, vocab),
            "target_rows": (self.target_rows, rows),
            "samples": (self.samples, count),
        }
        for name, (values, limit) in ranges.items():
            if len(values) and not (int(values.min()) >= 0 and int(values.max()) < limit):
                raise ValueError(f"micro-step: {name} must lie in [0, {limit})")
        if len(self.experts):
            self._check_experts(mixture)
        if len(self.target_rows) and (self.segments[self.target_rows] < 0).any():
            raise ValueError("micro-step: a target's row is padding")
        if len(self.temperatures) and float(self.temperatures.min()) <= 0.0:
            raise ValueError("micro-step: temperatures must be positive")

    def _check_experts(self, mixture: Mixture | None) -> None:
        if mixture is None or self.experts.shape != (len(self.tokens), mixture.layers, mixture.chosen):
            raise ValueError(f"micro-step: experts of shape {self.experts.shape} are not this model's: {mixture}")
        known = self.experts[self.experts != NO_EXPERTS]
        if len(known) and int(known.max()) >= mixture.experts:
            raise ValueError(f"micro-step: experts must lie in [0, {mixture.experts})")

    def padded(self, rows: int) -> MicroStepBatch:
        """With padding at the end up to a multiple of `rows`."""
        missing = -len(self.tokens) % rows
        if not missing:
            return self

        def longer(values: Int32, fill: int) -> Int32:
            return np.concatenate([values, np.full(missing, fill, np.int32)])

        tokens, positions = longer(self.tokens, 0), longer(self.positions, 0)
        experts = self.experts
        if len(experts):
            experts = np.concatenate([experts, np.full((missing, *experts.shape[1:]), NO_EXPERTS, np.uint16)])
        segments = longer(self.segments, -1)
        return replace(self, tokens=tokens, positions=positions, segments=segments, experts=experts)

    @classmethod
    def empty(cls) -> MicroStepBatch:
        """One target of weight zero: it adds zero to every gradient. For a rank that has no micro-step while others,
        whose tokens may need its experts, have one."""
        zero, nothing = np.zeros(1, np.int32), np.zeros(1, np.float32)
        return cls(
            tokens=zero,
            positions=zero,
            segments=zero,
            target_rows=zero,
            target_tokens=zero,
            behaviour_logprobs=nothing,
            samples=zero,
            advantages=nothing,
            weights=nothing,
            temperatures=np.ones(1, np.float32),
        )

    def packing(self) -> Packing:
        """Lengths of the segments' runs of rows, and their parents. ValueError unless contiguous, with padding at the
        end and parents in preorder."""
        edges = np.flatnonzero(np.diff(self.segments)) + 1
        bounds = [0, *edges.tolist(), len(self.segments)]
        runs = [(int(self.segments[a]), b - a) for a, b in pairwise(bounds) if b > a]
        if runs and runs[-1][0] < 0:
            runs.pop()
        names = [name for name, _ in runs]
        if any(name < 0 for name in names) or len(set(names)) != len(names):
            raise ValueError("micro-step: segments must be contiguous, with padding at the end only")
        lengths = tuple(length for _, length in runs)
        if not len(self.parents):
            return Packing(lengths=lengths)
        if names != list(range(len(self.parents))):
            raise ValueError(f"micro-step: {len(self.parents)} parents, but segments {names[:3]}... of {len(names)}")
        parents = tuple(self.parents.tolist())
        path: list[int] = []
        for segment, parent in enumerate(parents):
            while path and path[-1] != parent:
                path.pop()
            if parent != -1 and not path:
                raise ValueError(f"micro-step: segment {segment} goes on from {parent}, which is not preorder")
            path.append(segment)
        return Packing(lengths=lengths, parents=parents)


@dataclass(frozen=True)
class DeviceBatch:
    """The same on a device: indices int64, floats fp32."""

    tokens: torch.Tensor
    positions: torch.Tensor
    target_rows: torch.Tensor
    target_tokens: torch.Tensor
    behaviour_logprobs: torch.Tensor
    samples: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    temperatures: torch.Tensor
    experts: torch.Tensor | None = None
    """int32 (T, layers, chosen), -1 where the router chooses; None: it does everywhere."""


def to_device(batch: MicroStepBatch, device: torch.device) -> DeviceBatch:
    """Copy what the model takes; the arrays may be read-only memory maps."""

    def move(values: np.ndarray, dtype: type[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.array(values, dtype=dtype)).to(device)

    return DeviceBatch(
        tokens=move(batch.tokens, np.int64),
        positions=move(batch.positions, np.int64),
        target_rows=move(batch.target_rows, np.int64),
        target_tokens=move(batch.target_tokens, np.int64),
        behaviour_logprobs=move(batch.behaviour_logprobs, np.float32),
        samples=move(batch.samples, np.int64),
        advantages=move(batch.advantages, np.float32),
        weights=move(batch.weights, np.float32),
        temperatures=move(batch.temperatures, np.float32),
        experts=_experts(batch.experts, device) if len(batch.experts) else None,
    )


def _experts(numbers: npt.NDArray[np.uint16], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.where(numbers == NO_EXPERTS, -1, numbers.astype(np.int32))).to(device)
