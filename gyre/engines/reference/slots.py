"""KV storage in slots, and the attention that runs over it.

A slot holds one sequence's keys and values. Live sequences occupy the lowest slots, so that a decode step over all
of them is one attention call over a plain slice: no gather, no page table. Memory never holds NaN (it starts as
zeros and a slot with non-finite values is wiped), because masked positions still take part in the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

ATTENTION = "gyre_slots"


@dataclass(frozen=True)
class Shape:
    """What a model's KV looks like: layers, KV heads, head dimension, element type; and how many experts each layer
    chooses for a token (0: the model is dense)."""

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    chosen: int = 0

    def zeros(self, count: int, length: int) -> torch.Tensor:
        """[count, layers, 2, heads, length, head_dim] zeros whose pages are touched only when used."""
        dims = (count, self.layers, 2, self.heads, length, self.head_dim)
        itemsize = torch.empty(0, dtype=self.dtype).element_size()
        # numpy's zeros come from calloc: unlike torch's they cost no memory until they are written.
        raw = np.zeros(int(np.prod(dims)) * itemsize, dtype=np.uint8)
        return torch.from_numpy(raw).view(self.dtype).view(dims)

    def experts(self, count: int, length: int) -> torch.Tensor:
        """[count, length, layers, chosen] int32: which experts each token went to."""
        return torch.from_numpy(np.zeros((count, length, self.layers, self.chosen), dtype=np.int32))


class Slots:
    """`count` slots of `length` tokens each: their KV, and the experts that they went to."""

    def __init__(self, shape: Shape, count: int, length: int) -> None:
        self.count = count
        self.length = length
        self.kv = shape.zeros(count, length)
        self.experts = shape.experts(count, length)
        self.keys = [self.kv[:, layer, 0] for layer in range(shape.layers)]
        self.values = [self.kv[:, layer, 1] for layer in range(shape.layers)]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of one slot to another."""
        self.kv[target, :, :, :, :length] = self.kv[source, :, :, :, :length]
        self.experts[target, :length] = self.experts[source, :length]

    def wipe(self, slot: int) -> None:
        """Zero a slot that may hold non-finite values."""
        self.kv[slot].zero_()


@dataclass(frozen=True)
class Chunk:
    """`count` new tokens of one slot, from position `start`; rows [row, row + count) of the flat batch."""

    slot: int
    start: int
    count: int
    row: int


class Plan:
    """One forward pass over a flat batch: first the decode rows (one token a slot), then the prefill chunks."""

    def __init__(self, slots: Slots, decode: list[Chunk], prefill: list[Chunk]) -> None:
        self.slots = slots
        self.prefill = prefill
        self.decoding = len(decode)
        self.masks = [_chunk_mask(chunk) for chunk in prefill]
        if not decode:
            return
        self.slot = torch.tensor([chunk.slot for chunk in decode])
        self.position = torch.tensor([chunk.start for chunk in decode])
        self.high = int(self.slot.max()) + 1
        self.dense = self.high == len(decode)
        self.reach = int(self.position.max()) + 1
        # Slots below `high` that do not decode now get a row that sees one position and is thrown away.
        limit = torch.zeros(self.high, dtype=torch.long)
        limit[self.slot] = self.position
        self.mask = (torch.arange(self.reach) <= limit.unsqueeze(1))[:, None, None, :]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Store key and value, then attend. query: [tokens, heads, dim]; key, value: [tokens, KV heads, dim]."""
        keys, values = self.slots.keys[layer], self.slots.values[layer]
        out = torch.empty_like(query)
        if self.decoding:
            out[: self.decoding] = self._decode(keys, values, query, key, value, scale)
        for chunk, mask in zip(self.prefill, self.masks, strict=True):
            rows = slice(chunk.row, chunk.row + chunk.count)
            end = chunk.start + chunk.count
            keys[chunk.slot, :, chunk.start : end] = key[rows].transpose(0, 1)
            values[chunk.slot, :, chunk.start : end] = value[rows].transpose(0, 1)
            got = scaled_dot_product_attention(
                query[rows].transpose(0, 1).unsqueeze(0),
                keys[chunk.slot, :, :end].unsqueeze(0),
                values[chunk.slot, :, :end].unsqueeze(0),
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=True,
            )
            out[rows] = got[0].transpose(0, 1)
        return out

    def _decode(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        count = self.decoding
        keys[self.slot, :, self.position] = key[:count]
        values[self.slot, :, self.position] = value[:count]
        # The query heads that share a KV head become its queries: one attention call, nothing repeated.
        grouped = query[:count].reshape(count, keys.shape[1], -1, query.shape[-1])
        if not self.dense:
            padded = grouped.new_zeros((self.high, *grouped.shape[1:]))
            padded[self.slot] = grouped
            grouped = padded
        got = scaled_dot_product_attention(
            grouped,
            keys[: self.high, :, : self.reach],
            values[: self.high, :, : self.reach],
            attn_mask=self.mask,
            scale=scale,
        )
        if not self.dense:
            got = got[self.slot]
        return got.reshape(count, query.shape[1], query.shape[2])


def _chunk_mask(chunk: Chunk) -> torch.Tensor | None:
    """None where plain causal attention is right: a chunk that starts its sequence."""
    if chunk.start == 0:
        return None
    return torch.ones(chunk.count, chunk.start + chunk.count, dtype=torch.bool).tril(chunk.start)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    plan: Plan,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in every layer. query, key, value: [1, heads, tokens, dim], already rotated."""
    out = plan.attend(
        int(module.layer_idx),  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scaling,
    )
    return out.unsqueeze(0), None
