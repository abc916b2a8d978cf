"""Children of a process: started with pipes that tie their lives to ours, and ended by pid.

Owns starting and ending subprocesses. Invariant: a child sees end of file on its stdin when its parent dies, however
it dies; `end` leaves no process of the child's session behind.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any


class ChildDied(Exception):
    """A child ended when it was needed. The message names it and its status."""


class Child:
    """A subprocess in a session of its own, with its output in a log file."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.process = process

    @classmethod
    async def start(
        cls, name: str, argv: list[str], log_file: Path, env: dict[str, str] | None = None, fds: tuple[int, ...] = ()
    ) -> Child:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with open(log_file, "ab") as output:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={**os.environ, **(env or {})},
                pass_fds=fds,
                start_new_session=True,
            )
        return cls(name, process)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process.returncode is None

    async def wait(self) -> int:
        return await self.process.wait()

    async def end(self, grace: float = 0.0) -> None:
        """Ask with SIGTERM when there is `grace` (seconds), then kill the whole session."""
        if self.running and grace > 0:
            self.process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(self.process.wait(), grace)
            except asyncio.TimeoutError:
                pass  # it had its time; the kill below is what counts
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # nothing of the session is left
        await self.process.wait()


class RankChild:
    """Trainer rank 0 as its lead sees it: JSON lines out on stdin, answers on a pipe."""

    def __init__(self, child: Child, replies: asyncio.StreamReader) -> None:
        self.child = child
        self._replies = replies
        self._turn = asyncio.Lock()

    @classmethod
    async def start(cls, name: str, arguments: list[str], log_file: Path) -> RankChild:
        read_end, write_end = os.pipe()
        child = await Child.start(
            name,
            [sys.executable, "-m", "gyre.processes.trainer_rank", *arguments, "--reply-fd", str(write_end)],
            log_file,
            env={"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
            fds=(write_end,),
        )
        os.close(write_end)
        reader = asyncio.StreamReader(limit=1 << 24)
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb")
        )
        return cls(child, reader)

    async def ready(self) -> None:
        await self._reply()

    async def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """One operation and its answer. Raises ChildDied when the rank ends."""
        async with self._turn:
            if self.child.process.stdin is None or not self.child.running:
                raise ChildDied(f"{self.child.name} is gone")
            self.child.process.stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
            return await self._reply()

    async def _reply(self) -> dict[str, Any]:
        line = await self._replies.readline()
        if not line.endswith(b"\n"):
            raise ChildDied(f"{self.child.name} ended with status {await self.child.wait()}; see its log")
        answer: dict[str, Any] = json.loads(line)
        return answer
