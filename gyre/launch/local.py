"""The local launcher: one supervisor that keeps every process of a run going on this machine.

Owns the journal `supervisor` and the processes it starts. Invariants: each process has our pipe on its stdin, so none
outlives us, and when we end in order nothing that descends from us is left; what a dead supervisor left is ended first,
by pid and start time; a process that dies, or hangs, is started again within its budget, and a user's mistake ends the
run with its own line.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import gyre
from gyre.errors import UserError
from gyre.launch.orphans import adopt_orphans, bury, children_of, end_orphans
from gyre.ledger import events as ev
from gyre.ledger.identity import process_start, still_runs
from gyre.ledger.job import read_job
from gyre.ledger.journal import Journal
from gyre.ledger.layout import RunFolder
from gyre.ledger.liveness import LivenessWatch, read_counter
from gyre.ledger.state import RunState
from gyre.ledger.view import LedgerView
from gyre.processes.base import EXIT_SCHEDULER_SILENT, HANGS
from gyre.processes.children import EXIT_USER_ERRORS, Child
from gyre.recipe.schema import Recipe

MODULES = {name: name for name in ("scheduler", "processor", "store", "worker", "cell", "agent")}
POLL_SECONDS = 0.25
GRACE_SECONDS = 10.0
STARTS = 3
"""A process that ends by itself so many times in a row before it was ready will not be the next time either."""
BACKOFF_SECONDS = (0.2, 0.5, 1.0, 2.0, 5.0)


class Supervisor:
    """Runs a run to its end. `watch` is called with the folded state at each poll, for whoever shows progress."""

    def __init__(self, run: RunFolder, recipe: Recipe, watch: Callable[[RunState], None] | None = None) -> None:
        self.run, self.recipe = run, recipe
        self.job = read_job(run)
        self.view = LedgerView(run)
        self.view.poll()
        self._watch = watch or (lambda state: None)
        self._children: dict[str, Child] = {}
        self._restarts: dict[str, int] = {}
        self._failure = ""
        self._ending = False
        self._let_go_seconds = GRACE_SECONDS
        self._liveness = LivenessWatch(time.monotonic, HANGS * recipe.local.liveness)

    async def supervise(self) -> ev.EndState:
        """Start everything, keep it going, and return how the run ended."""
        reap(self.view.state)
        others = children_of(os.getpid())
        adopt_orphans()
        self.journal = Journal.open(self.run, "supervisor", time.time)
        self.journal.append(
            ev.Opened(pid=os.getpid(), pid_start=process_start(), host=socket.gethostname(), code=gyre.__version__)
        )
        keepers: list[asyncio.Task[None]] = []
        try:
            if await self._prepared():
                keepers = [asyncio.create_task(self._keep(name)) for name in self.job.processes()]
            return await self._until_end(keepers)
        finally:
            self._ending = True
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)
            await asyncio.gather(*(child.end() for child in self._children.values()))
            end_orphans(others, GRACE_SECONDS)
            self.journal.close()

    async def _until_end(self, keepers: list[asyncio.Task[None]]) -> ev.EndState:
        # the scheduler of an earlier attempt may have ended the run: only what this attempt's says counts
        before = max(self.view.state.opened.get("scheduler", {}), default=0)
        while True:
            self.view.poll()
            state = self.view.state
            self._watch(state)
            self._kill_hung()
            bury([child.pid for child in self._children.values()])
            for keeper in keepers:
                if keeper.done():
                    keeper.result()  # a defect of ours: with its traceback
            if self._failure:
                self._ending = True
                with contextlib.suppress(UserError):  # the disk may be full: the failure says so
                    self.journal.append(ev.GaveUp(reason=self._failure))
                return "failed"
            if max(state.opened.get("scheduler", {}), default=0) > before and state.ended is not None:
                self._ending = True
                await self._let_go()
                self.view.poll()
                self._watch(self.view.state)
                return state.ended.state
            await asyncio.sleep(POLL_SECONDS)

    async def prepare(self) -> None:
        """What has to be there before a process starts. Raises UserError."""

    async def _prepared(self) -> bool:
        try:
            await self.prepare()
        except UserError as error:
            self._failure = str(error)
        return not self._failure

    async def _let_go(self) -> None:
        """Everybody was told to stop; give them time to do it well."""
        running = [child.wait() for child in self._children.values() if child.running]
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.gather(*running), self._let_go_seconds)

    def _kill_hung(self) -> None:
        for name, child in self._children.items():
            self._liveness.observe(name, read_counter(self.run.alive_path(name)))
            if child.running and self._liveness.dead(name):
                self._liveness.forget(name)
                os.killpg(child.pid, signal.SIGKILL)

    @property
    def failure(self) -> str:
        """Why the run failed, in one line; empty when it did not."""
        ended = self.view.state.ended
        return self._failure or (ended.reason if ended is not None and ended.state == "failed" else "")

    async def _keep(self, name: str) -> None:
        """Start a process, and start it again when it ends before the run does."""
        unready = 0
        while True:
            restarts = self._restarts.get(name, 0)
            before = max(self.view.state.opened.get(name, {}), default=0)
            child = await self._start(name)
            code = await child.wait()
            reason = child.last_words()
            await child.end()
            if code in EXIT_USER_ERRORS and reason and not self._ending:
                self._failure = reason  # first of all: the journal's disk may be the one that is full
                return
            self.journal.append(ev.ProcessEnded(name=name, pid=child.pid, code=code))
            if self._ending or code == 0:
                return
            # one that was killed, or that nobody accepted, may do better the next time
            excused = code < 0 or code == EXIT_SCHEDULER_SILENT or self._was_ready(name, before)
            unready = 0 if excused else unready + 1
            if unready >= STARTS:
                why = reason or f"status {code}"
                self._failure = f"{name} ended {unready} times before it was ready ({why}); see {self._log(name)}"
                return
            if restarts >= self.recipe.local.restarts:
                self._failure = f"{name} ended {restarts + 1} times (last status {code}); see {self._log(name)}"
                return
            self._restarts[name] = restarts + 1
            await asyncio.sleep(BACKOFF_SECONDS[min(restarts, len(BACKOFF_SECONDS) - 1)])

    def _was_ready(self, name: str, before: int) -> bool:
        """Did the incarnation that opened after `before` get so far that it could work?"""
        self.view.poll()
        state = self.view.state
        newest = max(state.opened.get(name, {}), default=0)
        if newest <= before:
            return False
        if name in self.job.cells:
            cell = state.cells.get(name, {}).get(newest)
            return cell is not None and (cell.state == "ready" or any(what == "ready" for what, _, _ in cell.history))
        if name in self.job.workers:
            return newest in state.slots.get(name, {})
        return state.incarnation(name) == newest

    async def _start(self, name: str) -> Child:
        module = MODULES[name.partition("-")[0]]
        argv = [sys.executable, "-m", f"gyre.processes.{module}", "--run", str(self.run.path), "--name", name]
        child = await self._spawn(name, argv)
        self._children[name] = child
        self.journal.append(
            ev.ProcessStarted(
                name=name,
                pid=child.pid,
                pid_start=process_start(child.pid),
                restarts=self._restarts.get(name, 0),
            )
        )
        return child

    async def _spawn(self, name: str, argv: list[str]) -> Child:
        """Start a program here; another launcher starts it elsewhere."""
        return await Child.start(name, argv, self._log(name), {"OMP_NUM_THREADS": "1"})

    def _log(self, name: str) -> Path:
        return self.run.log_dir(self.job.attempt) / f"{name}.log"


def reap(state: RunState) -> None:
    """End what a dead supervisor's processes left running; a recycled pid has another start time."""
    for name, started in state.processes.items():
        ended = state.processes_ended.get(name)
        if ended is not None and ended.pid == started.pid:
            continue
        if still_runs(started.pid, started.pid_start):
            with contextlib.suppress(ProcessLookupError):  # it went just now
                os.killpg(started.pid, signal.SIGKILL)
