"""Training with the experts that the engine chose, where they are recorded.

Owns what stands in the place of Megatron's `RouterReplay` in each router of this rank: that one replays every row or
none, while a path has rows that no call recorded. Invariant: the chosen experts' weights are the router's own, and
their gradient with them; only the choice is not the router's. Outside `replayed` it chooses itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

TopK = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class Choice:
    """One layer's: `experts` int (rows, chosen), negative where the router is to choose."""

    def __init__(self) -> None:
        self.experts: torch.Tensor | None = None

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK = torch.topk,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """scores (rows, experts) -> the chosen ones and their experts, (rows, topk) each; called by Megatron."""
        values, own = default_compute_topk(scores, topk, num_groups, group_topk)
        if self.experts is None:
            return values, own
        wanted = self.experts.to(own)
        indices = torch.where(wanted < 0, own, wanted)
        return scores.gather(1, indices), indices


class Choices:
    """Those of this rank's layers, which are layers `first`, `first` + 1, ... of the model."""

    def __init__(self, layers: Sequence[torch.nn.Module], first: int, part: int = 0, parts: int = 1) -> None:
        """`part` of `parts`: the rows of the sequence that this rank has, where tensor-parallel ranks split it."""
        self._first, self._part, self._parts = first, part, parts
        self._choices = [Choice() for _ in layers]
        for layer, choice in zip(layers, self._choices, strict=True):
            layer.mlp.router.router_replay = choice  # type: ignore[union-attr, assignment]

    @contextmanager
    def replayed(self, experts: torch.Tensor | None) -> Iterator[None]:
        """A forward pass with these: int (T, layers of the model, chosen); None: the routers choose."""
        if experts is None:
            yield
            return
        rows = len(experts) // self._parts
        mine = experts[self._part * rows : (self._part + 1) * rows]
        for layer, choice in enumerate(self._choices, self._first):
            choice.experts = mine[:, layer]
        try:
            yield
        finally:
            for choice in self._choices:
                choice.experts = None
