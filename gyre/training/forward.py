"""From hidden states to log-probabilities of the targets.

Owns the chunks of the output layer. Invariant: at most `targets_per_chunk` rows of logits exist at a time,
forward and backward.
"""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from gyre.objective.logprobs import vocab_parallel_logprobs
from gyre.training import shims
from gyre.training.architecture import Architecture
from gyre.training.batch import DeviceBatch
from gyre.training.model import PolicyModel

with shims.importing():
    from megatron.core import parallel_state


def target_logprobs(
    hidden: torch.Tensor,
    model: PolicyModel,
    architecture: Architecture,
    batch: DeviceBatch,
    targets_per_chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """From hidden states (T, hidden) to the log-probability of each target at its sample's temperature,
    differentiable, and the entropy: fp32 (M,), (M,)."""
    hidden = hidden[batch.target_rows]
    temperatures = batch.temperatures[batch.samples]
    count = len(batch.target_rows)
    if count <= targets_per_chunk:
        return _chunk(hidden, batch.target_tokens, temperatures, model, architecture)
    logprobs, entropies = [], []
    for start in range(0, count, targets_per_chunk):
        part = slice(start, start + targets_per_chunk)
        arguments = (hidden[part], batch.target_tokens[part], temperatures[part], model, architecture)
        # Not kept but computed again in the backward pass: the loss needs every target's value before any
        # gradient.
        one, other = checkpoint(_chunk, *arguments, use_reentrant=False, preserve_rng_state=False)
        logprobs.append(one)
        entropies.append(other)
    return torch.cat(logprobs), torch.cat(entropies)


def _chunk(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    temperatures: torch.Tensor,
    model: PolicyModel,
    architecture: Architecture,
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model.logits(hidden)
    rank = parallel_state.get_tensor_model_parallel_rank()
    first = rank * logits.size(1)
    # The padding of the vocabulary takes no part: its columns are at the end of the last ranks.
    columns = max(0, min(logits.size(1), architecture.vocab - first))
    group = parallel_state.get_tensor_model_parallel_group()
    return vocab_parallel_logprobs(logits[:, :columns], targets, temperatures, first, group)
