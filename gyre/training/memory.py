"""Device memory of a trainer rank, given away while its cell serves rollouts.

Owns which tensors move, and the measuring of it. Invariant: after `offload` and `onload` every bit is what it was, and
every view of a moved buffer (a parameter's `main_grad`) still is a view of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

FREE_SECONDS = 30.0
"""For memory that was given back to be measured free; then something else has taken it."""
FREE_POLL = 0.01


@dataclass(frozen=True)
class Moved:
    """One move of a rank's memory. nbytes: moved, or on CPU what would move; free: of the device, measured after it."""

    nbytes: int
    seconds: float
    free: int


def measured(device: torch.device, move: Callable[[], int], frees: bool) -> Moved:
    """Do `move`, which returns bytes, and measure it. With `frees`, wait until that much more is measured free on the
    device than before; RuntimeError when it never is."""
    began, before = time.monotonic(), free_bytes(device)
    nbytes = move()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        while frees and free_bytes(device) < before + nbytes:
            if time.monotonic() - began > FREE_SECONDS:
                raise RuntimeError(f"{nbytes} bytes were given back, but {free_bytes(device) - before} more are free")
            time.sleep(FREE_POLL)
    return Moved(nbytes, time.monotonic() - began, free_bytes(device))


def free_bytes(device: torch.device) -> int:
    """Of the device; on CPU of the machine."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else available_on_host()


@dataclass
class OffloadedTensors:
    """Moves the storages of device tensors to the host and back. Tensors that share a storage move
    together."""

    _kept: list[tuple[torch.Tensor, int, torch.Tensor]] = field(default_factory=list)

    def offload(self, tensors: Iterable[torch.Tensor]) -> int:
        """Free the device memory of those tensors that have not given it away yet; returns its bytes. Until `onload`
        they must not be touched."""
        freed = 0
        for tensor in _one_per_storage(tensors):
            storage = tensor.untyped_storage()
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            size = storage.nbytes()
            host = torch.empty(size, dtype=torch.uint8, pin_memory=flat.is_cuda)  # pinned: copies at full speed
            self._kept.append((tensor, size, host.copy_(flat)))
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
    """Of tensors that hold memory: what has been given away has no storage."""
    held = (tensor for tensor in tensors if tensor.untyped_storage().nbytes())
    return list({tensor.untyped_storage().data_ptr(): tensor for tensor in held}.values())
