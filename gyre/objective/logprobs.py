"""Log-probabilities and entropies when the vocabulary's columns are split over ranks.

Owns the only softmax of training. Invariant: the logits that are handed in are never written to, and every
rank of the group gets the same numbers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

Group = dist.ProcessGroup


def vocab_parallel_logprobs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperatures: torch.Tensor,
    first: int = 0,
    group: Group | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log softmax(logits / T)[target], and the entropy of that distribution in nats.

    logits: (M, columns of this rank), any float dtype, computed in fp32; targets: int64 (M,), global token
    ids; temperatures: fp32 (M,); first: global id of this rank's first column; group: the tensor-parallel
    ranks, None for one. Returns fp32 (M,) and fp32 (M,). The first is differentiable in `logits`; the entropy
    is a statistic and is not.
    """
    logprobs, entropy = _VocabParallelLogprobs.apply(logits, targets, temperatures, first, group)
    return logprobs, entropy


class _VocabParallelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        temperatures: torch.Tensor,
        first: int,
        group: Group | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scale = temperatures[:, None].reciprocal()
        shifted = logits.float() * scale
        shifted -= _reduced(shifted.amax(dim=1), dist.ReduceOp.MAX, group)[:, None]

        local = targets - first
        here = (local >= 0) & (local < logits.size(1))
        column = torch.where(here, local, 0)[:, None]
        target = shifted.gather(1, column)[:, 0] * here

        weights = shifted.exp()
        sums = torch.stack((weights.sum(dim=1), (shifted * weights).sum(dim=1), target))
        total, weighted, target = _reduced(sums, dist.ReduceOp.SUM, group)
        weights /= total[:, None]
        entropy = total.log() - weighted / total
        ctx.save_for_backward(weights, column, here, scale)
        ctx.dtype = logits.dtype
        ctx.mark_non_differentiable(entropy)
        return target - total.log(), entropy

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        softmax, column, here, scale = ctx.saved_tensors
        scaled = gradient[:, None] * scale
        out = softmax * -scaled
        out.scatter_add_(1, column, scaled * here[:, None])
        return out.to(ctx.dtype), None, None, None, None


def _reduced(values: torch.Tensor, op: Any, group: Group | None) -> torch.Tensor:
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(values, op=op, group=group)
    return values
