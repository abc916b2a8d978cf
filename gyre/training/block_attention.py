"""Tree attention on a GPU: one FlexAttention kernel that skips the blocks of the mask that are empty.

Owns the block mask. Invariant: it is built from the segments in work proportional to the rows and the blocks, never
from a mask over all pairs of rows, which a long sequence has no memory for; and it says the same as that mask.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

if TYPE_CHECKING:
    from gyre.training.attention import Packing

BLOCK = 128
"""Rows of a block, the kernel's own default."""


@functools.cache
def available() -> bool:
    """FlexAttention is fast only when compiled, and that needs Triton."""
    try:
        import triton  # type: ignore[import-not-found,unused-ignore]  # noqa: F401
    except ImportError:
        return False
    return True


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packing: Packing, scale: float | None, compiled: bool = True
) -> torch.Tensor:
    """q (1, heads, T, d), k and v (1, kv heads, T, d) -> (1, heads, T, d), masked by the tree; padding comes out as
    zero."""
    mask = _block_mask(packing, q.size(2), q.device)
    attention: Any = _compiled() if compiled else flex_attention
    out: torch.Tensor = attention(q, k, v, block_mask=mask, scale=scale, enable_gqa=q.size(1) != k.size(1))
    return out


def block_mask(packing: Packing, rows: int, device: torch.device) -> BlockMask:
    """The tree's mask: row q sees row k when k <= q and q lies before the end of k's subtree.

    A pair of blocks is empty, whole or mixed; only mixed ones evaluate the mask row by row.
    """
    ends = packing.row_ends(rows, device)
    count = -(-rows // BLOCK)
    padded = torch.zeros(count * BLOCK, dtype=ends.dtype, device=device)
    padded[:rows] = ends
    last, first = padded.view(count, BLOCK).amax(dim=1), padded.view(count, BLOCK).amin(dim=1)
    start = torch.arange(count, device=device) * BLOCK
    stop = (start + BLOCK).clamp(max=rows)
    below = start[:, None] > start[None, :]
    some = (start[:, None] >= start[None, :]) & (start[:, None] < last[None, :])
    whole = below & (stop[:, None] <= first[None, :])

    def sees(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (query < ends[key])

    mixed, full = _indices(some & ~whole), _indices(whole)
    mask: BlockMask = BlockMask.from_kv_blocks(*mixed, *full, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(rows, rows))
    return mask


def _indices(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many key blocks each query block has, and which, those first: int32 (1, 1, n), (1, 1, n, n)."""
    chosen = blocks.to(torch.int32)
    order = torch.argsort(chosen, dim=1, descending=True, stable=True).to(torch.int32)
    return chosen.sum(dim=1, dtype=torch.int32)[None, None], order[None, None]


_last: list[tuple[Any, BlockMask]] = []


def _block_mask(packing: Packing, rows: int, device: torch.device) -> BlockMask:
    """The mask of the micro-step in hand, made once for all its layers."""
    name = (packing.lengths, packing.parents, rows, device)
    if not _last or _last[0][0] != name:
        _last[:] = [(name, block_mask(packing, rows, device))]
    return _last[0][1]


@functools.cache
def _compiled() -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=True)
    return compiled
