"""What every long-running process does: open its journal, beat, follow the ledger, end with its parent.

Owns `Process`. Invariants: a process acts on orders only after the scheduler accepted its incarnation; it ends when its
stdin reaches end of file (its parent died, and be it busy), when the run is stopped, or when the scheduler's counter
stands still; however it ends, `close` runs, and a user's mistake reaches its parent as one line.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import gyre
from gyre.errors import UserError
from gyre.ledger import events as ev
from gyre.ledger.files import FULL, errno_of, write_error
from gyre.ledger.identity import process_start
from gyre.ledger.job import Job, read_job
from gyre.ledger.journal import Journal
from gyre.ledger.layout import RunFolder
from gyre.ledger.liveness import Heartbeat, LivenessWatch, read_counter
from gyre.ledger.state import RunState
from gyre.ledger.tail import Line
from gyre.ledger.view import LedgerView
from gyre.processes.children import say_last_words
from gyre.recipe.load import load_recipe
from gyre.recipe.schema import Recipe

log = logging.getLogger("gyre")

POLL_SECONDS = 0.1
BEAT_SECONDS = 1.0
HANGS = 4
"""A process whose counter stands still for so many times `local.liveness` is killed; others give it up after one."""
EXIT_PARENT_GONE = 3
EXIT_SCHEDULER_SILENT = 4
EXIT_RESTART = 75
"""Of an incarnation that is of no use any more: the next one begins afresh."""
GRACE_SECONDS = 5.0
"""For a process whose parent is gone to end in order; then it ends all the same."""


class EndProcess(Exception):
    """Ends this process with status `code`, in order; SystemExit, from inside a task, would tear its loop down."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


class Process:
    """One incarnation of a named process of a run. Subclasses give `work`."""

    def __init__(self, run: RunFolder, name: str) -> None:
        self.run = run
        self.name = name
        self.recipe: Recipe = load_recipe(run.recipe, folders=False)
        self.job: Job = read_job(run)
        self.view = LedgerView(run)
        self.journal = Journal.open(run, name, time.time)
        self.journal.append(
            ev.Opened(pid=os.getpid(), pid_start=process_start(), host=socket.gethostname(), code=gyre.__version__)
        )
        self.stopping = asyncio.Event()
        self._heart = Heartbeat(run.alive_path(name))
        self._watch = LivenessWatch(time.monotonic, 0.75 * self.recipe.local.liveness)
        self._polled = asyncio.Condition()

    @property
    def incarnation(self) -> int:
        return self.journal.incarnation

    @property
    def state(self) -> RunState:
        return self.view.state

    @property
    def accepted(self) -> bool:
        return self.state.incarnation(self.name) == self.incarnation

    def say(self, event: Any, durable: bool = True) -> int:
        return self.journal.append(event, durable)

    async def work(self) -> None:
        """The process's own work; returning ends the process with status 0."""
        raise NotImplementedError

    async def on_lines(self, lines: list[Line]) -> None:
        """New lines of the ledger, after they were folded."""

    async def close(self) -> None:
        """Let go of everything; called once, however the process ends."""

    async def look(self) -> None:
        """Take in what the ledger says by now. For what must not be decided on the last poll's word."""
        lines = self.view.poll()
        if lines:
            await self.on_lines(lines)
            async with self._polled:
                self._polled.notify_all()

    async def follow(self) -> None:
        """Poll the ledger until the run is stopped. The processes' one clock of discovery."""
        while True:
            await self.look()
            if self.accepted and self.state.stopped is not None:
                self.stopping.set()
                return
            await asyncio.sleep(POLL_SECONDS)

    async def beat(self) -> None:
        while True:
            self._heart.beat()
            self._watch.observe("scheduler", read_counter(self.run.alive_path("scheduler")))
            if self.name != "scheduler" and self._watch.dead("scheduler"):
                raise EndProcess(EXIT_SCHEDULER_SILENT, "the scheduler's counter stands still")
            await asyncio.sleep(BEAT_SECONDS)

    async def until(self, condition: Any) -> None:
        """Wait until `condition()` holds for the folded state; it is asked after each poll that brought news."""
        async with self._polled:
            await self._polled.wait_for(condition)

    async def until_accepted(self) -> None:
        await self.until(lambda: self.accepted)

    async def main(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stopping.set)
        tasks = [
            asyncio.create_task(self.beat()),
            asyncio.create_task(parent_gone()),
            asyncio.create_task(self.follow()),
            asyncio.create_task(self.work()),
            asyncio.create_task(self.stopping.wait()),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            try:
                await self.close()
            finally:
                self.journal.close()


async def parent_gone() -> None:
    """Ends the process when stdin reaches end of file: the parent's end of the pipe closed."""
    loop, gone = asyncio.get_running_loop(), asyncio.Event()
    threading.Thread(target=_watch_stdin, args=(loop, gone), name="parent", daemon=True).start()
    await gone.wait()
    raise EndProcess(EXIT_PARENT_GONE, "the parent is gone")


def _watch_stdin(loop: asyncio.AbstractEventLoop, gone: asyncio.Event) -> None:
    """A thread of its own: the event loop may be busy for long, and nothing it still does would count."""
    while os.read(0, 4096):
        pass
    try:
        loop.call_soon_threadsafe(gone.set)
    except RuntimeError:
        return  # the loop is closed: the process is at its end
    time.sleep(GRACE_SECONDS)
    os._exit(EXIT_PARENT_GONE)


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--run", required=True, help="run folder")
    parser.add_argument("--name", required=True, help="name of this process in the run")
    return parser


def run_process(kind: type[Process]) -> None:
    """Main function of a process module. A user's mistake, and a full disk, is one line and its exit code."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr, force=True
    )
    options = arguments(kind.__doc__ or "").parse_args()

    run = RunFolder(Path(options.run))

    async def start() -> None:
        await kind(run, options.name).main()

    try:
        asyncio.run(start())
    except EndProcess as end:
        say_last_words(str(end))
        raise SystemExit(end.code) from None
    except (UserError, OSError) as error:
        mistake = user_error(run, error)
        if mistake is None:
            raise
        say_last_words(f"{options.name}: {mistake}")
        raise SystemExit(mistake.code) from None


def user_error(run: RunFolder, error: UserError | OSError) -> UserError | None:
    """What a user can mend of `error`: a full file system is one, whoever met it; None when it is ours."""
    if isinstance(error, UserError):
        return error
    return write_error(run.journal, error) if errno_of(error) in FULL else None
