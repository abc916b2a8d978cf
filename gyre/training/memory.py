"""Device memory of a trainer rank, given away while its cell serves rollouts.

Owns which tensors move. Invariant: after `offload` and `onload` every bit is what it was, and every view of a
moved buffer (a parameter's `main_grad`) still is a view of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch


@dataclass
class OffloadedTensors:
    """Moves the storages of device tensors to the host and back. Tensors that share a storage move
    together."""

    _kept: list[tuple[torch.Tensor, int, torch.Tensor]] = field(default_factory=list)

    def offload(self, tensors: Iterable[torch.Tensor]) -> int:
        """Free the tensors' device memory; returns its bytes. Until `onload` they must not be touched."""
        if self._kept:
            raise RuntimeError("already offloaded")
        freed = 0
        for tensor in _one_per_storage(tensors):
            storage = tensor.untyped_storage()
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            size = storage.nbytes()
            self._kept.append((tensor, size, flat.cpu() if flat.is_cuda else flat.clone()))
            storage.resize_(0)
            freed += size
        return freed

    def onload(self) -> int:
        """Bring everything back; returns the bytes."""
        taken = 0
        for tensor, size, copy in self._kept:
            storage = tensor.untyped_storage()
            storage.resize_(size)
            torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage).copy_(copy)
            taken += size
        self._kept.clear()
        return taken


def available_on_host() -> int:
    """Bytes that this machine can still give to processes without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind tensors, each counted once."""
    return sum(tensor.untyped_storage().nbytes() for tensor in _one_per_storage(tensors))


def _one_per_storage(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return list({tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}.values())
