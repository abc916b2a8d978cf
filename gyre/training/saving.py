"""Checkpoints beside the training: the next step runs while the last one's weights are being written.

Owns the thread that writes. Invariants: at most one checkpoint is being written; it is of a copy that nothing else
touches; a failure to write is raised in the training thread, at the next call here.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch.distributed as dist

from gyre.ledger.checkpoints import CheckpointInfo, CheckpointMeta
from gyre.training import layout, memory, state
from gyre.training.model import PolicyModel
from gyre.training.optimizer import Adam

SMALL_BYTES = 64 << 20
"""Not worth a thread: such a checkpoint is written within a second."""
SHARE = 0.5
"""Of the memory that is available on this machine, for the copies of all its ranks."""


class Saver:
    """Writes one cell's checkpoints; all calls are collectives of its ranks, but for `poll`."""

    def __init__(self) -> None:
        self._group = layout.another_group()
        self._thread: threading.Thread | None = None
        self._info: CheckpointInfo | None = None
        self._problem: BaseException | None = None

    def save(self, model: PolicyModel, optimizer: Adam, folder: Path, meta: CheckpointMeta, nonce: str) -> bool:
        """Begin to write, or write; is it being written in the background? Else it is complete. Raises UserError for
        this one or the one before."""
        self.wait()
        shards, meta = state.collect(model, optimizer, meta)
        arrays = state.arrays_of(shards)
        if not _room(shards):
            state.write(shards, arrays, folder, meta, nonce)
            return False
        copies = state.copied(shards)
        self._thread = threading.Thread(
            target=self._write, args=(copies, arrays, folder, meta, nonce, self._group), name="checkpoint", daemon=True
        )
        self._thread.start()
        return True

    def _write(self, *arguments: Any) -> None:
        try:
            self._info = state.write(*arguments)
        except BaseException as error:
            self._problem = error

    def poll(self) -> CheckpointInfo | None:
        """The checkpoint that has become complete since the last call, if one has; told once."""
        if self._thread is None or self._thread.is_alive():
            return None
        return self.wait()

    def wait(self) -> CheckpointInfo | None:
        """Like `poll`, but waits for one that is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._problem is not None:
            problem, self._problem = self._problem, None
            raise problem
        info, self._info = self._info, None
        return info


def _room(shards: list[state.Shard]) -> bool:
    """Is it large enough to be worth a thread, and is there memory for a second copy? The same on every rank."""
    own = sum(shard.tensor.nbytes for shard in shards if shard.writes)
    sizes: list[tuple[int, int]] = [(own, memory.available_on_host())] * dist.get_world_size()
    if len(sizes) > 1:
        dist.all_gather_object(sizes, sizes[0])
    needed = sum(size for size, _ in sizes)
    return SMALL_BYTES <= needed <= SHARE * min(free for _, free in sizes)
