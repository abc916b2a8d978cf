"""A reader's view of a run: the journals followed and folded, with a snapshot to start from.

Owns the snapshot file. Invariant: `state` is the fold of what was read so far; when a cut arrives late, everything is
read again with the cuts known. A snapshot is a cache: absent, old or unreadable, it costs time and nothing else.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gyre.ledger.files import write_atomic
from gyre.ledger.fold import LateCut, fold
from gyre.ledger.job import read_job
from gyre.ledger.layout import RunFolder
from gyre.ledger.state import RunState
from gyre.ledger.tail import JournalTail, Line

SNAPSHOT_VERSION = 1


class Snapshot(msgspec.Struct, frozen=True):
    version: int
    offsets: dict[str, Any]
    state: RunState


class LedgerView:
    """Follows every writer of job.toml. One thread uses it."""

    def __init__(self, run: RunFolder, snapshot: bool = True) -> None:
        self.run = run
        self._writers = read_job(run).writers()
        self._tail = JournalTail(run, self._writers)
        self.state = RunState()
        saved = _load(run) if snapshot else None
        if saved is not None:
            self.state = saved.state
            self._tail.restore(saved.offsets)

    def poll(self) -> list[Line]:
        """Read and fold what is new; the lines are returned as read, in each writer's order."""
        lines = self._tail.poll()
        try:
            for line in lines:
                fold(self.state, line)
        except LateCut:
            self._again()
        return lines

    def _again(self) -> None:
        while True:
            self.state = RunState(cuts=self.state.cuts)
            self._tail = JournalTail(self.run, self._writers)
            try:
                for line in self._tail.poll():
                    fold(self.state, line)
                return
            except LateCut:
                continue

    def save(self) -> None:
        """Write the snapshot. Only the scheduler does."""
        snapshot = Snapshot(SNAPSHOT_VERSION, self._tail.offsets(), self.state)
        write_atomic(self.run.snapshot, msgspec.msgpack.encode(snapshot))


def _load(run: RunFolder) -> Snapshot | None:
    try:
        data = run.snapshot.read_bytes()
        saved = msgspec.msgpack.decode(data, type=Snapshot)
    except (FileNotFoundError, msgspec.DecodeError, msgspec.ValidationError):
        return None  # a cache: without it, everything is read
    return saved if saved.version == SNAPSHOT_VERSION else None
