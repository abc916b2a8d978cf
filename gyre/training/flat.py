"""Flat buffers: a rank's parameters as one contiguous run of bytes, and digests of such buffers.

Owns the order in which parameters lie in a flat buffer: the order of `model.named_parameters()`, which is the
order of construction and the same on every machine. Invariant: `scatter(flatten(p))` changes no bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from gyre.ledger.digest import new_digest


def flatten(parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """A new contiguous host tensor (n,) of the parameters' common dtype."""
    with torch.no_grad():
        return torch.cat([parameter.detach().reshape(-1).cpu() for parameter in parameters])


def scatter(buffer: torch.Tensor, parameters: Iterable[torch.Tensor]) -> None:
    """Copy a buffer made by `flatten` back. ValueError when its dtype or its length does not fit."""
    targets = list(parameters)
    count = sum(target.numel() for target in targets)
    if buffer.numel() != count or buffer.dtype != targets[0].dtype:
        raise ValueError(f"a flat buffer of {buffer.numel()} {buffer.dtype} does not fit {count} of {targets[0].dtype}")
    offset = 0
    with torch.no_grad():
        for target in targets:
            target.copy_(buffer[offset : offset + target.numel()].view_as(target))
            offset += target.numel()


def digest(buffers: Sequence[torch.Tensor]) -> str:
    """The digest over the bytes of contiguous host tensors, in order."""
    state = new_digest()
    for buffer in buffers:
        state.update(buffer.detach().view(torch.uint8).numpy().data)
    return state.hexdigest()


def combined_digest(digests: Sequence[str]) -> str:
    """One digest for a cell, from its ranks' digests in rank order. A single rank's digest stands for
    itself."""
    if len(digests) == 1:
        return digests[0]
    return new_digest("\n".join(digests).encode()).hexdigest()
