"""Packing samples into micro-steps: layout "paths".

Owns when a micro-step closes. Invariant: the micro-steps, their content and their order are a function of the
order in which samples, flushes and the step's end come in, so a restart that folds the same journal derives
the same files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from gyre.ledger.microsteps import MicroStep
from gyre.trajectory.samples import Sample

OPEN_MICROSTEPS = 4
"""Micro-steps that may be open at a time: more pack tighter, fewer reach the training cells sooner."""
SHORTEST_SAMPLE = 2
"""Tokens: one target and the token that predicts it."""


@dataclass(slots=True)
class _Open:
    tokens: int = 0
    samples: list[Sample] = field(default_factory=list)


class Packer:
    """First-fit over the micro-steps of one step that are open, oldest first.

    A micro-step closes when nothing fits any more; when a sample fits in none and `OPEN_MICROSTEPS` are open
    (the fullest closes, the oldest of equals); at a flush; at the step's end.
    """

    def __init__(self, step: int, tokens_per_microstep: int) -> None:
        self._step = step
        self._bound = tokens_per_microstep
        self._open: list[_Open] = []
        self._ended = False

    def add_group(self, samples: Iterable[Sample]) -> list[MicroStep]:
        """Packs samples in this order; returns the micro-steps that closed.

        Raises `ValueError` for a sample over `tokens_per_microstep` (selection never makes one), or after the
        end.
        """
        return [microstep for sample in samples for microstep in self._add(sample)]

    def flush(self) -> list[MicroStep]:
        """Closes what is open, oldest first."""
        closed, self._open = self._open, []
        return [lay_out(self._step, each.samples) for each in closed]

    def end_step(self) -> list[MicroStep]:
        """Closes what is open; nothing can be added afterwards."""
        self._ended = True
        return self.flush()

    def _add(self, sample: Sample) -> list[MicroStep]:
        size = len(sample.tokens)
        if self._ended:
            raise ValueError(f"step {self._step} has ended: execution {sample.execution} cannot be packed into it")
        if size > self._bound:
            raise ValueError(
                f"a path of execution {sample.execution} has {size} tokens, over the {self._bound} of a micro-step"
            )
        closed: list[MicroStep] = []
        fit = next((each for each in self._open if each.tokens + size <= self._bound), None)
        if fit is None:
            if len(self._open) == OPEN_MICROSTEPS:
                closed.append(self._close(max(self._open, key=lambda each: each.tokens)))
            fit = _Open()
            self._open.append(fit)
        fit.samples.append(sample)
        fit.tokens += size
        if fit.tokens + SHORTEST_SAMPLE > self._bound:
            closed.append(self._close(fit))
        return closed

    def _close(self, full: _Open) -> MicroStep:
        self._open = [each for each in self._open if each is not full]
        return lay_out(self._step, full.samples)


def lay_out(step: int, samples: Sequence[Sample]) -> MicroStep:
    """One or more samples side by side, without padding: sample s is segment s, positions restart at 0."""
    lengths = [len(sample.tokens) for sample in samples]
    starts = np.cumsum([0, *lengths[:-1]])
    numbers = np.arange(len(samples), dtype=np.int32)
    each = list(zip(samples, starts, strict=True))
    return MicroStep(
        step=step,
        tokens=np.concatenate([sample.tokens for sample in samples]),
        positions=np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        segments=np.repeat(numbers, lengths),
        target_rows=np.concatenate([sample.target_rows + np.int32(start) for sample, start in each]),
        target_tokens=np.concatenate([sample.target_tokens for sample in samples]),
        behaviour_logprobs=np.concatenate([sample.behaviour_logprobs for sample in samples]),
        target_samples=np.repeat(numbers, [sample.targets for sample in samples]),
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
    )
