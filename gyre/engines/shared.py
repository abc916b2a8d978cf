"""Weights in shared memory: engines on this node read them where they lie, and are sent only where that is.

Owns the memory of one push and the descriptors by which it is offered. Invariants: the memory has no name in any file
system, so nothing of it is left when its processes end, however they end; a descriptor is given only to who has the
engines' key; what one bucket left is overwritten by the next one, which comes when all have answered that they have it.
"""

from __future__ import annotations

import base64
import io
import multiprocessing
import pickle
import threading
from multiprocessing import resource_sharer
from multiprocessing.reduction import ForkingPickler

import torch
import torch.multiprocessing as torch_multiprocessing  # teaches ForkingPickler tensors

ALIGNED = 64
"""Bytes: any dtype may begin there."""


class SharedBuckets:
    """The shared memory of one push, as large as its largest bucket. `key`: the secret that its engines have too."""

    def __init__(self, key: str) -> None:
        torch_multiprocessing.set_sharing_strategy("file_descriptor")
        resource_sharer.stop()  # the sharer keeps the key that it began with, and each engine has a key of its own
        multiprocessing.current_process().authkey = key.encode()
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._bucket: list[tuple[str, torch.Tensor]] = []
        self._laid: list[tuple[str, torch.Tensor]] = []
        self._turn = threading.Lock()

    def serialize(self, named_tensors: list[tuple[str, torch.Tensor]], receivers: int) -> list[str]:
        """Base64 of a pickle of (Hugging Face name, tensor in shared memory), for each of `receivers` processes one
        that can be read once. Overwrites what was serialized before, unless it is the very same list: then another
        engine is to read it too."""
        with self._turn:
            if named_tensors is not self._bucket:
                self._bucket, self._laid = named_tensors, self._lay_out(named_tensors)
            return [_pickled(self._laid) for _ in range(receivers)]

    def _lay_out(self, named_tensors: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
        starts, end = [], 0
        for _, tensor in named_tensors:
            starts.append(end)
            end += -(-tensor.nbytes // ALIGNED) * ALIGNED
        if end > self._memory.nbytes:
            self._memory = torch.empty(end, dtype=torch.uint8).share_memory_()
        laid = []
        for start, (name, tensor) in zip(starts, named_tensors, strict=True):
            place = self._memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            place.copy_(tensor.detach())
            laid.append((name, place))
        return laid


def _pickled(laid: list[tuple[str, torch.Tensor]]) -> str:
    stream = io.BytesIO()
    ForkingPickler(stream, pickle.HIGHEST_PROTOCOL).dump(laid)
    return base64.b64encode(stream.getbuffer()).decode("ascii")
