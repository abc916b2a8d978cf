"""Memory that an engine may touch: regions, and views of what callers bring.

Owns the life of registered memory. Invariant: memory stays alive, at its address, from before its registration until
after its unregistration (or the engine's end); a region that is closed or quarantined cannot be named again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from gyre.transfer.errors import Misuse

Bytes = npt.NDArray[np.uint8]
_PAGE = 4096


def as_bytes(buffer: Any) -> Bytes:
    """`buffer` as a flat uint8 array, without a copy for contiguous host memory.

    Takes numpy arrays, torch tensors (copied to the host if on a device) and anything with the buffer protocol.
    Raises TypeError for anything else, and ValueError for host memory that is not C-contiguous.
    """
    torch = sys.modules.get("torch")  # a tensor can only exist if its caller imported torch
    if torch is not None and isinstance(buffer, torch.Tensor):
        if not buffer.is_contiguous():
            raise ValueError("a tensor to transfer must be contiguous")
        flat: Bytes = buffer.detach().cpu().reshape(-1).view(torch.uint8).numpy()
        return flat
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise ValueError("a buffer to transfer must be C-contiguous")
    if view.nbytes == 0:
        return np.empty(0, np.uint8)
    return np.frombuffer(view.cast("B"), np.uint8)


def aligned(nbytes: int) -> Bytes:
    """A fresh, page-aligned uint8 array of `nbytes`, not initialised."""
    base = np.empty(nbytes + _PAGE, np.uint8)
    start = -base.ctypes.data % _PAGE
    return base[start : start + nbytes]


class Region:
    """Registered memory of one session: `address`, `nbytes`. Made by `TransferSession.allocate` and `adopt`."""

    def __init__(self, memory: Bytes, owner: object, release: Callable[[Region], None]) -> None:
        self.address = int(memory.ctypes.data)
        self.nbytes = int(memory.nbytes)
        self.state: Literal["live", "busy", "closed", "quarantined"] = "live"
        self._memory: Bytes | None = memory
        self._owner: object | None = owner
        self._release = release

    def array(self) -> Bytes:
        """The memory as uint8 [nbytes]. Raises Misuse once the region was closed or quarantined."""
        if self.state not in ("live", "busy") or self._memory is None:
            raise Misuse(f"the region is {self.state}")
        return self._memory

    def view(self) -> memoryview:
        """The memory as a writable memoryview of bytes (for `torch.frombuffer`, `numpy.frombuffer`)."""
        return self.array().data

    def close(self) -> None:
        """Unregister, then let go of the memory. Idempotent; a quarantined region goes with its session."""
        if self.state == "busy":
            raise Misuse("a transfer into the region is in flight")
        if self.state == "live":
            self._release(self)
            self._drop("closed")

    def _drop(self, state: Literal["closed", "quarantined"]) -> tuple[Bytes | None, object | None]:
        kept = (self._memory, self._owner)
        self.state, self._memory, self._owner = state, None, None
        return kept


class QuarantinedRegion(msgspec.Struct, frozen=True):
    """Memory of a failed transfer, in which bytes could still land: kept until its engine is gone, never reused."""

    address: int
    nbytes: int
    reason: str
    kept: tuple[object | None, object | None]
