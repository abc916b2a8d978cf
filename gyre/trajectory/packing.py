"""Packing samples into micro-steps.

Owns when a micro-step closes. Invariant: the micro-steps, their content and their order are a function of the
order in which samples, flushes and the step's end come in, so a restart that folds the same journal derives
the same files.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from gyre.ledger.microsteps import MicroStep
from gyre.trajectory.blocks import Block, blocks_of
from gyre.trajectory.layout import lay_out
from gyre.trajectory.samples import Sample

OPEN_MICROSTEPS = 4
"""Micro-steps that may be open at a time: more pack tighter, fewer reach the training cells sooner."""
SHORTEST_SAMPLE = 2
"""Tokens: one target and the token that predicts it."""


@dataclass(slots=True)
class _Open:
    tokens: int = 0
    blocks: list[Block] = field(default_factory=list)


class Packer:
    """First-fit of blocks over the micro-steps of one step that are open, oldest first. `packing`: a block is a path,
    or an execution's tree.

    A micro-step closes when nothing fits any more; when a block fits in none and `OPEN_MICROSTEPS` are open
    (the fullest closes, the oldest of equals); at a flush; at the step's end.
    """

    def __init__(self, step: int, tokens_per_microstep: int, packing: Literal["paths", "tree"] = "paths") -> None:
        self._step = step
        self._packing = packing
        self._bound = tokens_per_microstep
        self._open: list[_Open] = []
        self._ended = False

    def add_group(self, samples: Iterable[Sample]) -> list[MicroStep]:
        """Packs samples in this order (those of an execution together); returns the micro-steps that closed.

        Raises `ValueError` for a sample over `tokens_per_microstep` (selection never makes one), or after the
        end.
        """
        blocks = blocks_of(samples, self._packing, self._bound)
        return [microstep for block in blocks for microstep in self._add(block)]

    def flush(self) -> list[MicroStep]:
        """Closes what is open, oldest first."""
        closed, self._open = self._open, []
        return [lay_out(self._step, each.blocks) for each in closed]

    def end_step(self) -> list[MicroStep]:
        """Closes what is open; nothing can be added afterwards."""
        self._ended = True
        return self.flush()

    def _add(self, block: Block) -> list[MicroStep]:
        size = block.tokens
        if self._ended:
            execution = block.samples[0].execution
            raise ValueError(f"step {self._step} has ended: execution {execution} cannot be packed into it")
        closed: list[MicroStep] = []
        fit = next((each for each in self._open if each.tokens + size <= self._bound), None)
        if fit is None:
            if len(self._open) == OPEN_MICROSTEPS:
                closed.append(self._close(max(self._open, key=lambda each: each.tokens)))
            fit = _Open()
            self._open.append(fit)
        fit.blocks.append(block)
        fit.tokens += size
        if fit.tokens + SHORTEST_SAMPLE > self._bound:
            closed.append(self._close(fit))
        return closed

    def _close(self, full: _Open) -> MicroStep:
        self._open = [each for each in self._open if each is not full]
        return lay_out(self._step, full.blocks)
