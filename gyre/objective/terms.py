"""What every objective takes and gives.

Owns the two records that `surrogate` passes to one objective and gets back. Invariant: an objective's terms
are per sample, so weights and signs are applied in one place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_BOUND = 20.0
"""Log-ratios are bounded to +-20 before exp: an infinite ratio would make 0 * inf = nan in the gradient of a
clipped term."""


@dataclass(frozen=True)
class Targets:
    """M targets of S samples; each sample's targets are all here.

    log_ratio: fp32 (M,), log pi_new - log pi_behaviour, differentiable; new_logprobs: fp32 (M,),
    differentiable; samples: int64 (M,); counts: fp32 (S,), targets of each sample; advantages: fp32 (S,).
    """

    log_ratio: torch.Tensor
    new_logprobs: torch.Tensor
    samples: torch.Tensor
    counts: torch.Tensor
    advantages: torch.Tensor

    def mean_per_sample(self, values: torch.Tensor) -> torch.Tensor:
        """Mean over each sample's own targets: (M,) -> (S,); zero for a sample without targets."""
        sums = torch.zeros_like(self.counts).index_add(0, self.samples, values)
        return sums / self.counts.clamp(min=1.0)


@dataclass(frozen=True)
class Terms:
    """per_sample: fp32 (S,), the surrogate of each sample, to be maximised. ratio (fp32) and clipped (bool):
    per unit, which is a sample, (S,), when `sequence_level`, and else a target, (M,)."""

    per_sample: torch.Tensor
    ratio: torch.Tensor
    clipped: torch.Tensor
    sequence_level: bool = False


def bounded_ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp(log_ratio), within exp(-20) .. exp(20)."""
    return log_ratio.clamp(-_BOUND, _BOUND).exp()


def pessimistic(
    ratio: torch.Tensor, advantages: torch.Tensor, clip: tuple[float, float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """min(r A, clip(r, 1 - lo, 1 + hi) A) (PPO, arXiv 1707.06347), and where the clip decides: no gradient
    there."""
    low, high = clip
    term = torch.minimum(ratio * advantages, ratio.clamp(1.0 - low, 1.0 + high) * advantages)
    clipped = ((advantages > 0) & (ratio > 1.0 + high)) | ((advantages < 0) & (ratio < 1.0 - low))
    return term, clipped
