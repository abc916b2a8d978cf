"""A cell's trainer ranks as its lead sees them: one group that does one operation at a time.

Owns starting the ranks, asking them, and noticing that one is gone or stands still. Invariants: only rank 0 is asked
and answers, for all; the loss of any rank ends every question, asked or to come, and one that stands still is killed,
so that no question waits for ever; ranks of one node meet through a file that no other incarnation has, those of
several through a socket of rank 0's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gyre.errors import UserError
from gyre.ledger.liveness import LivenessWatch, read_counter
from gyre.processes.base import BEAT_SECONDS, HANGS, Process
from gyre.processes.children import Child, ChildDied
from gyre.processes.parts import Part

log = logging.getLogger("gyre")

FELLOWS_SECONDS = 5.0
"""How long a rank's end waits for a better reason: the first to die is often the victim of another's mistake."""


class Ranks:
    """Ranks 0..n-1: JSON lines out on rank 0's stdin, answers on a pipe. Those of further nodes are parts, which
    end as children do."""

    def __init__(self, meeting: tempfile.TemporaryDirectory[str]) -> None:
        self.children: list[Child] = []
        self.parts: list[Part] = []
        self._meeting = meeting
        self._replies = asyncio.StreamReader(limit=1 << 24)
        self._turn = asyncio.Lock()
        self._watch: asyncio.Task[None] | None = None

    @classmethod
    async def of_cell(
        cls, process: Process, cell: str, incarnation: int, numbers: range, rendezvous: str, listener: int = -1
    ) -> Ranks:
        """Start those of `cell` that lie on this process's node, for that incarnation of its lead. See `start`."""
        run, job = process.run, process.job
        where = ["--run", str(run.path), "--cell", cell, "--incarnation", str(incarnation), "--model", job.model]
        deadline = HANGS * process.recipe.local.liveness
        logs = run.log_dir(job.attempt)
        return await cls.start(cell, numbers, where, logs, run.alive_path, deadline, rendezvous, listener)

    @classmethod
    async def start(
        cls,
        name: str,
        numbers: range,
        arguments: list[str],
        logs: Path,
        alive: Callable[[str], Path],
        deadline: float,
        rendezvous: str = "",
        listener: int = -1,
    ) -> Ranks:
        """Start the ranks `numbers`; each logs to `logs`/<name>-rank-<i>.log. They answer after `ready`.

        `rendezvous`: host:port where they meet those of other nodes; rank 0 listens there on descriptor `listener`.
        `alive` names the liveness file of each; one whose counter stands still for `deadline` seconds is killed.
        """
        ranks = cls(tempfile.TemporaryDirectory(prefix="gyre-ranks-", ignore_cleanup_errors=True))
        try:
            where = f"tcp://{rendezvous}" if rendezvous else f"file://{ranks._meeting.name}/store"
            for rank in numbers:
                alive(f"{name}-rank-{rank}").unlink(missing_ok=True)  # a predecessor's counter would stand still
                words = [*arguments, "--rank", str(rank), "--rendezvous", where]
                await ranks._start_one(f"{name}-rank-{rank}", rank, words, logs, listener)
        except BaseException:
            await ranks.end()
            raise
        ranks.watch(alive, LivenessWatch(time.monotonic, deadline))
        return ranks

    @property
    def members(self) -> list[Child | Part]:
        return [*self.children, *self.parts]

    def watch(self, alive: Callable[[str], Path], liveness: LivenessWatch, every: float = BEAT_SECONDS) -> None:
        """Kill what stands still; whoever waits for it then learns of its end. Looked at `every` so many seconds."""
        self._watch = asyncio.create_task(self._kill_silent(alive, liveness, every))

    async def _kill_silent(self, alive: Callable[[str], Path], liveness: LivenessWatch, every: float) -> None:
        while True:
            for child in self.children:
                liveness.observe(child.name, read_counter(alive(child.name)))
                if child.running and liveness.dead(child.name):
                    log.error("%s stands still: killing it", child.name)
                    child.process.kill()
                    liveness.forget(child.name)
            await asyncio.sleep(every)

    async def _start_one(self, name: str, rank: int, arguments: list[str], logs: Path, listener: int) -> None:
        argv = [sys.executable, "-m", "gyre.processes.trainer_rank", *arguments]
        # a rank ends by a kill: what it leaves in its temporary folder goes with the meeting's
        env = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "TMPDIR": self._meeting.name}
        if rank:
            self.children.append(await Child.start(name, argv, logs / f"{name}.log", env))
            return
        theirs = await self.reply_pipe()
        try:
            argv += ["--reply-fd", str(theirs)]
            given: tuple[int, ...] = (theirs,)
            if listener >= 0:
                argv += ["--listener", str(listener)]
                given = (theirs, listener)
            self.children.append(await Child.start(name, argv, logs / f"{name}.log", env, fds=given))
        finally:
            os.close(theirs)

    async def reply_pipe(self) -> int:
        """The end on which rank 0 answers; to be closed here once rank 0 has it."""
        ours, theirs = os.pipe()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(self._replies), os.fdopen(ours, "rb")
        )
        return theirs

    async def ready(self) -> None:
        await self._reply()

    async def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """One operation of all ranks, and rank 0's answer. Raises ChildDied when a rank ends, UserError when one says
        why."""
        async with self._turn:
            stdin = self.children[0].process.stdin
            if stdin is None or not all(member.running for member in self.members):
                raise await self.death()
            stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
            return await self._reply()

    async def _reply(self) -> dict[str, Any]:
        """Rank 0's line, unless a rank ends before it: the others could wait for that one for long."""
        line = asyncio.ensure_future(self._replies.readline())
        deaths = [asyncio.ensure_future(member.wait()) for member in self.members]
        try:
            await asyncio.wait({line, *deaths}, return_when=asyncio.FIRST_COMPLETED)
            if not line.done() or not line.result().endswith(b"\n"):
                raise await self.death()
            answer: dict[str, Any] = json.loads(line.result())
            return answer
        finally:
            for task in (line, *deaths):
                task.cancel()

    async def death(self) -> UserError | ChildDied:
        """Waits until a rank has ended; why it did. A mistake that any rank names goes before a rank's mere end."""
        deaths = [asyncio.ensure_future(member.death()) for member in self.members]
        try:
            done, others = await asyncio.wait(deaths, return_when=asyncio.FIRST_COMPLETED)
            first = next(iter(done)).result()
            if others and not isinstance(first, UserError):
                more, _ = await asyncio.wait(others, timeout=FELLOWS_SECONDS)
                done |= more
            reasons = [task.result() for task in done]
            return next((reason for reason in reasons if isinstance(reason, UserError)), first)
        finally:
            for task in deaths:
                task.cancel()

    async def end(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        await asyncio.gather(*(member.end() for member in self.members))  # at once: none logs the end of another
        with contextlib.suppress(OSError):
            self._meeting.cleanup()
