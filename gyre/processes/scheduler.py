"""The scheduler: tail, fold, decide, append. The one decision maker of a run.

Owns the journal `scheduler` and the snapshot. Invariant: each order is journalled before anybody can act on it, and
folded before the next decision; everything it knows is in the ledger, so a new incarnation goes on where this one ends.
"""

from __future__ import annotations

import asyncio
import time

from gyre.ledger import events as ev
from gyre.ledger.fold import fold
from gyre.ledger.layout import RunFolder
from gyre.ledger.liveness import LivenessWatch, read_counter
from gyre.ledger.tail import Line
from gyre.processes.base import POLL_SECONDS, Process, run_process
from gyre.processes.pauses import Pauses
from gyre.scheduling.decider import Decider
from gyre.scheduling.settings import settings_of

SNAPSHOT_SECONDS = 30.0
SNAPSHOT_SHARE = 0.01
"""Of the scheduler's time that snapshots may take."""


class Scheduler(Process):
    """gyre's scheduler process."""

    def __init__(self, run: RunFolder, name: str) -> None:
        super().__init__(run, name)
        job = self.job
        self.settings = settings_of(
            self.recipe, tuple(job.workers), tuple(job.tasks), tuple(job.eval_tasks), tuple(job.guests)
        )
        self._others = LivenessWatch(time.monotonic, self.recipe.local.liveness)
        self.decider = Decider(self.state, self.settings)
        self._pauses = Pauses(time.monotonic)
        self._since: dict[str, tuple[object, float]] = {}
        self._save_at = time.monotonic() + SNAPSHOT_SECONDS

    async def follow(self) -> None:
        """Take the predecessor's place, then poll and decide until the run has ended."""
        self.poll()
        seen = self.state.seen.get(self.name, {})
        self.order(
            ev.Accepted(
                writer=self.name,
                incarnation=self.incarnation,
                cut={i: n for i, n in seen.items() if i != self.incarnation},
            )
        )
        while self.state.ended is None:
            self.poll()
            self.decide()
            if time.monotonic() > self._save_at:
                self._save()
            await asyncio.sleep(POLL_SECONDS)
        self.view.poll()
        self.view.save()

    def _save(self) -> None:
        """Nothing is decided meanwhile, so the longer it takes the less often it is done."""
        began = time.monotonic()
        self.view.save()
        took = time.monotonic() - began
        self._save_at = began + took + max(SNAPSHOT_SECONDS, took / SNAPSHOT_SHARE)

    async def work(self) -> None:
        """The work is `follow`; `main` ends with it."""
        await asyncio.Event().wait()

    def poll(self) -> None:
        """Fold what others have said, and tell the decider."""
        known = self.state
        lines = self.view.poll()
        if self.state is not known:
            self.decider = Decider(self.state, self.settings)  # a cut came late: everything was folded anew
            return
        for line in lines:
            self.decider.folded(line.writer, line.event)

    def decide(self) -> None:
        """Decide until there is nothing to say; liveness is looked at once, between two polls."""
        dead = self._dead()
        self.decider.look(dead, self._waiting(), self._pauses.now(self.state))
        while orders := self.decider.decide():
            for event in orders:
                self.order(event)
            # what was ordered just now has not waited at all: measure again
            self.decider.look(dead, self._waiting(), self._pauses.now(self.state))

    def order(self, event: ev.Event) -> None:
        n = self.say(event)
        fold(self.state, Line(self.name, self.incarnation, n, time.time(), event))
        self.decider.folded(self.name, event)

    def _dead(self) -> frozenset[str]:
        dead = set()
        for name in (*self.job.processes(), *self.job.guests):
            self._others.observe(name, read_counter(self.run.alive_path(name)))
            if name != self.name and self._others.dead(name):
                dead.add(name)
        return frozenset(dead)

    def _waiting(self) -> dict[str, float]:
        now = time.monotonic()
        for cell in self.job.all_cells():
            found = self.state.cell(cell)
            moment = (self.state.roles.get(cell), found and (found.state, found.serving, found.training))
            if cell not in self._since or self._since[cell][0] != moment:
                self._since[cell] = (moment, now)
        return {cell: now - since for cell, (_, since) in self._since.items()}


if __name__ == "__main__":
    run_process(Scheduler)
