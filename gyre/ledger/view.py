"""A reader's view of a run: the journals followed and folded, with a snapshot to start from.

Invariants: `state` is the fold of what was read so far; when a cut arrives late, everything is read again with the cuts
known. A line is handed out once, and only if it counts.
"""

from __future__ import annotations

from gyre.ledger.fold import LateCut, afresh, fold
from gyre.ledger.job import read_job
from gyre.ledger.layout import RunFolder
from gyre.ledger.snapshot import SnapshotStore
from gyre.ledger.state import RunState
from gyre.ledger.tail import JournalTail, Line


class LedgerView:
    """Follows every writer of job.toml. One thread uses it."""

    def __init__(self, run: RunFolder, snapshot: bool = True) -> None:
        self.run = run
        self._writers = read_job(run).writers()
        self._tail = JournalTail(run, self._writers)
        self._store = SnapshotStore(run)
        self.state = RunState()
        saved = self._store.load() if snapshot else None
        if saved is not None:
            self.state, offsets = saved
            self._tail.restore(offsets)

    def poll(self) -> list[Line]:
        """Read and fold what is new. Returns the lines that counted, in each writer's order.

        A line that was folded by its own writer (`fold(view.state, ...)`) before is not news.
        """
        lines = self._tail.poll()
        if not lines:
            return []
        out: list[Line] = []
        before = {writer: dict(seen) for writer, seen in self.state.seen.items()}
        try:
            for line in lines:
                if fold(self.state, line):
                    self._store.folded(line.event)
                    out.append(line)
        except LateCut:
            return self._again(before)
        return out

    def _again(self, before: dict[str, dict[int, int]]) -> list[Line]:
        """Read everything again, with the cuts known; the news is what was not folded before this poll."""
        self._store.forget()
        while True:
            self.state = afresh(self.state)
            self._tail = JournalTail(self.run, self._writers)
            news: list[Line] = []
            try:
                for line in self._tail.poll():
                    if fold(self.state, line) and line.n > before.get(line.writer, {}).get(line.incarnation, -1):
                        news.append(line)
                return news
            except LateCut:
                continue

    def save(self) -> None:
        """Write the snapshot. Only the scheduler does."""
        self._store.save(self.state, self._tail.offsets())
