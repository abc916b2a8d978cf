"""A cell's gradient: sums over its micro-steps in Megatron's flat fp32 buffers, and the contributions of
other cells.

Owns the order of summation. Invariant: what a step trains on is (own micro-steps, in their order) +
(contributions, summed in the order in which they were added). Contributions wait in a sum of their own on the
host, so it does not matter between which of the core's micro-steps they arrive, and a replay that repeats
both orders gets the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gyre.training import flat, shims

with shims.importing():
    from megatron.core.distributed import DistributedDataParallel


@dataclass(frozen=True)
class FrozenGradients:
    """A contribution: host copies that nothing writes to any more, and their digest."""

    buffers: list[torch.Tensor]
    digest: str


class Gradients:
    """The gradient buffers of one rank: fp32, 1-D, dense ones first, then expert ones; Megatron decides their
    layout."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model
        self._merged: list[torch.Tensor] | None = None

    def buffers(self) -> list[torch.Tensor]:
        """The live `grad_data` tensors. The next micro-step changes them."""
        return [buffer.grad_data for buffer in (*self._model.buffers, *self._model.expert_parallel_buffers)]

    def zero(self) -> None:
        """Forget this cell's own sums and every contribution."""
        self._model.zero_grad_buffer()
        self._merged = None

    def freeze(self) -> FrozenGradients:
        """Copy this cell's own sums to the host, at a micro-step boundary. `zero` only once the core has
        answered."""
        copies = [buffer.detach().cpu().clone() for buffer in self.buffers()]
        return FrozenGradients(copies, flat.digest(copies))

    def add(self, contribution: Sequence[torch.Tensor]) -> None:
        """Merge another cell's frozen buffers of the same rank. ValueError, and nothing added, unless shapes
        agree."""
        own = self.buffers()
        shapes = [(tuple(buffer.shape), buffer.dtype) for buffer in own]
        if [(tuple(buffer.shape), buffer.dtype) for buffer in contribution] != shapes:
            raise ValueError(f"a contribution must have the buffers {shapes}")
        if self._merged is None:
            self._merged = [torch.zeros(buffer.shape, dtype=buffer.dtype) for buffer in own]
        for total, buffer in zip(self._merged, contribution, strict=True):
            total.add_(buffer)

    def total(self, scale: float) -> None:
        """Own sums plus contributions, times `scale`, in place: the step's gradient. To be called once a
        step."""
        merged, self._merged = self._merged, None
        for index, buffer in enumerate(self.buffers()):
            if merged is not None:
                buffer.add_(merged[index].to(buffer.device))
            buffer.mul_(scale)

    def bytes(self) -> int:
        """Device memory of the buffers."""
        return sum(buffer.nbytes for buffer in self.buffers())
