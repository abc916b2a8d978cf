"""Tensors between a Hugging Face folder's layout and Megatron's shards.

Owns no state: pure functions on tensors. Invariant: `to_hf` of all shards of `to_megatron` is the input, bit
for bit, under every tensor-parallel size that divides the model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gyre.training.architecture import Architecture
from gyre.training.names import Mapping


def to_megatron(
    mapping: Mapping, tensors: Sequence[torch.Tensor], architecture: Architecture, parallel: int, rank: int
) -> torch.Tensor:
    """The shard of tensor-parallel rank `rank` of `parallel`, from whole tensors in the order of
    `mapping.hf`."""
    if mapping.kind == "replicated":
        return tensors[0]
    if mapping.kind == "columns":
        return tensors[0].chunk(parallel, dim=1)[rank].contiguous()
    if mapping.kind == "gate_up":
        return torch.cat([tensor.chunk(parallel)[rank] for tensor in tensors])
    if mapping.kind == "qkv":
        return _interleave(tensors, architecture).chunk(parallel)[rank].contiguous()
    whole = tensors[0]
    missing = architecture.padded_vocab(parallel) - whole.size(0)
    padded = torch.cat([whole, whole.new_zeros(missing, whole.size(1))]) if missing > 0 else whole
    return padded.chunk(parallel)[rank].contiguous()


def to_hf(mapping: Mapping, shards: Sequence[torch.Tensor], architecture: Architecture) -> list[torch.Tensor]:
    """Whole tensors in the order of `mapping.hf`, from the shards of all tensor-parallel ranks in order."""
    if mapping.kind == "replicated":
        return [shards[0]]
    if mapping.kind == "columns":
        return [torch.cat(list(shards), dim=1)]
    if mapping.kind == "gate_up":
        halves = [shard.chunk(2) for shard in shards]
        return [torch.cat([half[part] for half in halves]) for part in (0, 1)]
    whole = torch.cat(list(shards))
    if mapping.kind == "qkv":
        return _separate(whole, architecture)
    return [whole[: architecture.vocab].contiguous()]


def _interleave(tensors: Sequence[torch.Tensor], architecture: Architecture) -> torch.Tensor:
    """[queries of the group | key | value] for each key-value group: a plain dim-0 chunk is then a shard."""
    groups, dim, width = architecture.kv_heads, architecture.head_dim, tensors[0].shape[1:]
    parts = [tensor.reshape(groups, -1, dim, *width) for tensor in tensors]
    return torch.cat(parts, dim=1).reshape(-1, *width)


def _separate(whole: torch.Tensor, architecture: Architecture) -> list[torch.Tensor]:
    groups, dim, width = architecture.kv_heads, architecture.head_dim, whole.shape[1:]
    queries = architecture.heads // groups
    parts = whole.reshape(groups, queries + 2, dim, *width).split([queries, 1, 1], dim=1)
    return [part.reshape(-1, *width) for part in parts]
