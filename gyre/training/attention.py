"""Core attention over packed segments and token trees, and the rotary embedding that takes positions.

Owns what Megatron's own attention cannot do: segment-packed, tree-packed and arbitrarily masked sequences in pure
torch, one interface for CPU and GPU. Invariant: a token attends to the earlier tokens of its own segment and to all of
that segment's ancestors, and to nothing else; padding attends to nothing and comes out as zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F

from gyre.training import block_attention, shims

with shims.importing():
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class Packing(PackedSeqParams):  # type: ignore[misc]
    """Which rows form which segment; travels to the core attention in Megatron's own argument for packing.

    `lengths`: rows of each segment, in order; rows after the last segment are padding. `parents`: of each segment, -1
    for a root, segments in preorder; empty when all are roots. `qkv_format` stays "sbhd": Megatron's own "thd" path
    would restart positions by itself, and gyre gives every token's position.
    """

    lengths: tuple[int, ...] = ()
    qkv_format: str = "sbhd"
    parents: tuple[int, ...] = ()

    def ancestors(self) -> list[list[int]]:
        """For each segment its ancestors, root first."""
        chains: list[list[int]] = []
        for parent in self.parents or (-1,) * len(self.lengths):
            chains.append([*chains[parent], parent] if parent >= 0 else [])
        return chains

    def ends(self) -> list[int]:
        """For each segment the row behind its last descendant: row q of the tree sees row k when k <= q and q is
        before the end of k's segment."""
        ends = list(accumulate(self.lengths))
        for segment in reversed(range(len(self.parents))):
            parent = self.parents[segment]
            if parent >= 0:
                ends[parent] = max(ends[parent], ends[segment])
        return ends

    def row_ends(self, rows: int, device: torch.device | None = None) -> torch.Tensor:
        """`ends` of each row's segment, int64 (rows,); zero for padding, which nothing sees."""
        ends = torch.tensor([*self.ends(), 0], device=device)
        return ends.repeat_interleave(torch.tensor([*self.lengths, rows - sum(self.lengths)], device=device))

    def dense_mask(self, rows: int, device: torch.device | None = None) -> torch.Tensor:
        """The same as a bool mask (1, 1, rows, rows), True where masked: what the tree means, for small ones."""
        order = torch.arange(rows, device=device)
        ends = self.row_ends(rows, device)
        return ~((order[None, :] <= order[:, None]) & (order[:, None] < ends[None, :]))[None, None]


class PositionRotary(torch.nn.Module):
    """Rotary embedding (RoFormer, arXiv 2104.09864) at given positions; Megatron's ignores them."""

    def __init__(self, dim: int, base: float) -> None:
        super().__init__()
        exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        self.inverse_frequencies = 1.0 / (base**exponents)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """positions: int (T,) -> angles: float32 (T, 1, 1, dim), in Megatron's half-and-half order."""
        if self.inverse_frequencies.device != positions.device:
            self.inverse_frequencies = self.inverse_frequencies.to(positions.device)
        angles = positions.to(torch.float32)[:, None] * self.inverse_frequencies
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]


class SegmentAttention(MegatronModule):  # type: ignore[misc]
    """Scaled dot-product attention, pluggable into Megatron's layer spec as `core_attention`."""

    def __init__(self, config: TransformerConfig, *, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        packed_seq_params: Packing | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """query (T, 1, heads, d), key and value (T, 1, kv heads, d) -> (T, 1, heads * d).

        With a `Packing`, causal within each segment and its ancestors; else by `attention_mask`, bool
        (1, 1, T, T), True where masked; else causal.
        """
        q, k, v = (tensor[:, 0].transpose(0, 1)[None] for tensor in (query, key, value))
        if packed_seq_params is not None and packed_seq_params.parents:
            out = self._tree(q, k, v, packed_seq_params)
        elif packed_seq_params is not None and packed_seq_params.lengths:
            out = self._segments(q, k, v, packed_seq_params.lengths)
        elif attention_mask is not None:
            out = self._attend(q, k, v, attn_mask=~attention_mask)
        else:
            out = self._attend(q, k, v, is_causal=True)
        return out[0].transpose(0, 1).reshape(query.size(0), 1, -1)

    def _segments(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
        """A loop over segments: its cost is the sum of squares, where a dense mask's is the square of the
        sum."""
        padding = q.size(2) - sum(lengths)
        sizes = [*lengths, padding] if padding else list(lengths)
        pieces = zip(*(tensor.split(sizes, dim=2) for tensor in (q, k, v)), strict=True)
        outs = [self._attend(*piece, is_causal=True) for _, piece in zip(lengths, pieces, strict=False)]
        if padding:
            outs.append(torch.zeros_like(q[:, :, :padding]))
        return torch.cat(outs, dim=2)

    def _tree(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packing: Packing) -> torch.Tensor:
        """On a GPU with a compiler one kernel over a block mask. Else a loop over segments, each with the keys of its
        ancestors: its cost is the pairs that the tree has, where a mask over all rows costs their square."""
        if q.is_cuda and block_attention.available():
            return block_attention.attend(q, k, v, packing, self.scale)
        padding = q.size(2) - sum(packing.lengths)
        sizes = [*packing.lengths, padding] if padding else list(packing.lengths)
        queries, keys, values = (tensor.split(sizes, dim=2) for tensor in (q, k, v))
        outs = []
        for segment, above in enumerate(packing.ancestors()):
            if not above:
                outs.append(self._attend(queries[segment], keys[segment], values[segment], is_causal=True))
                continue
            part = [torch.cat([each[i] for i in (*above, segment)], dim=2) for each in (keys, values)]
            own, seen = sizes[segment], part[0].size(2)
            mask = torch.ones(own, seen, dtype=torch.bool, device=q.device).tril(seen - own)
            outs.append(self._attend(queries[segment], *part, attn_mask=mask))
        if padding:
            outs.append(torch.zeros_like(queries[-1]))
        return torch.cat(outs, dim=2)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **mask: Any) -> torch.Tensor:
        grouped = q.size(1) != k.size(1)
        return F.scaled_dot_product_attention(q, k, v, scale=self.scale, enable_gqa=grouped, **mask)
