"""The trainer-engine difference in the unit of the objective's ratio.

Owns the choice of unit. Invariant: only targets that the present weights sampled are compared; a policy that has moved
since is staleness, not a difference.
"""

from __future__ import annotations

import torch

SEQUENCE_LEVEL = frozenset({"gspo"})
"""Objectives with one ratio a sample."""


def units_of(
    objective: str, difference: torch.Tensor, samples: torch.Tensor, count: int
) -> tuple[list[int], list[float]]:
    """For each unit the number of compared targets of its sample, and its difference in nats.

    difference: fp32 (M,), recomputed minus recorded log-probability of each compared target; samples: int64 (M,) in
    [0, count). A unit is a sample, as the mean over its targets (gspo), or a target.
    """
    lengths = torch.bincount(samples, minlength=count)
    if objective in SEQUENCE_LEVEL:
        present = lengths > 0
        sums = torch.zeros(count, dtype=difference.dtype, device=difference.device).index_add(0, samples, difference)
        return lengths[present].tolist(), (sums[present] / lengths[present]).tolist()
    return lengths[samples].tolist(), difference.tolist()
