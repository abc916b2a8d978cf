"""A process on another node of the allocation, as the job's supervisor sees it: an srun of one task.

Owns the srun and the two pipes through it: the guard's stdin (its end of file ends the process) and the guard's
stdout, on which it tells what happened. Invariant: srun's own exit status is never believed (it is 0 for a step whose
node died); a process that ended without the guard's word was lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from typing import Any

from gyre.processes.children import Child

EXIT_LOST = 76
"""Of a step that ended without a word: its node, its guard or its srun is gone."""
START_SECONDS = 60.0
END_SECONDS = 6.0
"""For a step to end once its stdin is closed, and again once srun was told to end it."""


class StepChild(Child):
    """`process` is the srun."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        super().__init__(name, process, -1)
        self._started = asyncio.Event()
        self._code = EXIT_LOST
        self._reason = ""
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start_step(cls, name: str, argv: list[str]) -> StepChild:
        """Start srun; its own complaints go where ours go, to the job's log."""
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True
        )
        return cls(name, process)

    async def _read(self) -> None:
        if self.process.stdout is None:
            raise RuntimeError("srun was started without a pipe")
        async for line in self.process.stdout:
            with contextlib.suppress(json.JSONDecodeError):  # a prologue of the site may print what it likes
                self._hear(json.loads(line))

    def _hear(self, told: Any) -> None:
        if not isinstance(told, dict):
            return
        if "started" in told:
            self._started.set()
        if "code" in told:
            self._code, self._reason = int(told["code"]), str(told.get("reason", ""))

    async def started(self) -> bool:
        """Wait until the process runs on its node; False when the step could not be started."""
        waiting = asyncio.create_task(self._started.wait())
        ended = asyncio.create_task(self.process.wait())
        try:
            await asyncio.wait({waiting, ended}, timeout=START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
            ended.cancel()
        return self.begun

    @property
    def begun(self) -> bool:
        """Has the guard told that the process runs?"""
        return self._started.is_set()

    async def wait(self) -> int:
        await self.process.wait()
        await asyncio.wait({self._reader})
        return self._code

    def last_words(self) -> str:
        return self._reason

    async def end(self, grace: float = 0.0) -> None:
        """Close its stdin, then let srun end the step, then kill srun: its own watchdog ends the step then."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        if self.running:
            await self._leave(max(grace, END_SECONDS))
        if self.running:
            self.process.send_signal(signal.SIGTERM)
            await self._leave(END_SECONDS)
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        await self.process.wait()
        self._reader.cancel()

    async def _leave(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), seconds)
