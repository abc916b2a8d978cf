"""One entrance to every objective: from log-probabilities to a loss sum and its statistics.

Owns the sign, the weights and the sum. Invariant: the loss is a plain sum over samples, so the losses of any
split of samples into micro-steps add up to the loss of the whole; the step divides once, by its graded
executions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from gyre.objective.cispo import cispo
from gyre.objective.grpo import grpo
from gyre.objective.gspo import gspo
from gyre.objective.terms import Targets, Terms
from gyre.objective.tis import tis

OBJECTIVES: dict[str, Callable[[Targets, tuple[float, float]], Terms]] = {
    "gspo": gspo,
    "grpo": grpo,
    "cispo": cispo,
    "tis": tis,
}


@dataclass(frozen=True)
class Surrogate:
    """loss: fp32 scalar, - sum_j weight_j surrogate_j. A unit is a sample (gspo) or a target (the others);
    units of weight zero are not counted. ratio_*: over units; 1.0 when there are none."""

    loss: torch.Tensor
    units: int
    clipped: int
    ratio_sum: float
    ratio_min: float
    ratio_max: float


def surrogate(
    name: str,
    *,
    new_logprobs: torch.Tensor,
    behaviour_logprobs: torch.Tensor,
    samples: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    clip: tuple[float, float],
) -> Surrogate:
    """The loss of one micro-step under objective `name`; the loss of an execution is the sum over its samples
    j of weight_j * -surrogate_j, wherever they are packed.

    new_logprobs: fp32 (M,), differentiable; behaviour_logprobs: fp32 (M,); samples: int64 (M,) in [0, S);
    advantages, weights: fp32 (S,); clip: (lo, hi), ratios within [1 - lo, 1 + hi] are not clipped.
    All targets of a sample must be in this call. KeyError for an unknown name.
    """
    counts = torch.zeros_like(advantages).index_add(0, samples, torch.ones_like(behaviour_logprobs))
    targets = Targets(new_logprobs - behaviour_logprobs, new_logprobs, samples, counts, advantages)
    terms = OBJECTIVES[name](targets, clip)
    loss = -(weights * terms.per_sample).sum()

    trained = (weights != 0) & (counts > 0)
    counted = trained if terms.sequence_level else trained[samples]
    ratio = terms.ratio.detach()[counted]
    if not len(ratio):
        return Surrogate(loss, 0, 0, 0.0, 1.0, 1.0)
    return Surrogate(
        loss=loss,
        units=len(ratio),
        clipped=int(terms.clipped[counted].sum()),
        ratio_sum=float(ratio.sum()),
        ratio_min=float(ratio.min()),
        ratio_max=float(ratio.max()),
    )
