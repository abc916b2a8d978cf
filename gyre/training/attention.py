"""Core attention over packed segments, and the rotary embedding that takes positions.

Owns what Megatron's own attention cannot do: segment-packed and arbitrarily masked sequences in pure torch,
one code path for CPU and GPU. Invariant: a token attends to earlier tokens of its own segment and to nothing
else; padding attends to nothing and comes out as zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from gyre.training import shims

with shims.quiet():
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class Packing(PackedSeqParams):  # type: ignore[misc]
    """Which rows form which segment; travels to the core attention in Megatron's own argument for packing.

    `lengths`: rows of each segment, in order; rows after the last segment are padding. `qkv_format` stays
    "sbhd": Megatron's own "thd" path would restart positions by itself, and gyre gives every token's
    position.
    """

    lengths: tuple[int, ...] = ()
    qkv_format: str = "sbhd"


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

        With a `Packing`, block-diagonal causal; else by `attention_mask`, bool (1, 1, T, T), True where
        masked; else causal.
        """
        q, k, v = (tensor[:, 0].transpose(0, 1)[None] for tensor in (query, key, value))
        if packed_seq_params is not None and packed_seq_params.lengths:
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

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **mask: Any) -> torch.Tensor:
        grouped = q.size(1) != k.size(1)
        return F.scaled_dot_product_attention(q, k, v, scale=self.scale, enable_gqa=grouped, **mask)
