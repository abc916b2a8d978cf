"""Children of a process: started with pipes that tie their lives to ours, and ended by pid.

Owns starting and ending subprocesses, and the way of a child's last words. Invariants: a child sees end of file on its
stdin when its parent dies, however it dies; `end` leaves no process of the child's session behind; the reason of an
end reaches the parent through a pipe, for a log may be on the file system that is full.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

from gyre.errors import UserError

EXIT_USER_ERRORS = (1, 2)
WORDS = "GYRE_LAST_WORDS"
"""Names the descriptor on which a child gives the reason of its end."""
WORDS_BYTES = 4096


class ChildDied(Exception):
    """A child ended when it was needed. The message names it and its status."""


class Child:
    """A subprocess in a session of its own, with its output in a log file."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, words: int) -> None:
        self.name = name
        self.process = process
        self._words = words
        self._said: str | None = None

    @classmethod
    async def start(
        cls, name: str, argv: list[str], log_file: Path, env: dict[str, str] | None = None, fds: tuple[int, ...] = ()
    ) -> Child:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        words, theirs = os.pipe()
        os.set_blocking(words, False)
        try:
            with open(log_file, "ab") as output:
                process = await asyncio.create_subprocess_exec(
                    *argv,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    env={**os.environ, **(env or {}), WORDS: str(theirs)},
                    pass_fds=(*fds, theirs),
                    start_new_session=True,
                )
        except BaseException:
            os.close(words)
            raise
        finally:
            os.close(theirs)
        return cls(name, process, words)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process.returncode is None

    async def wait(self) -> int:
        return await self.process.wait()

    def last_words(self) -> str:
        """The reason that it gave for its end, one line; "" when it gave none. To be asked when it has ended."""
        if self._said is None:
            data = b""
            if self._words >= 0:
                with contextlib.suppress(BlockingIOError):
                    data = os.read(self._words, WORDS_BYTES)
            self._said = (data.decode(errors="replace").strip().splitlines() or [""])[-1]
        return self._said

    async def death(self) -> UserError | ChildDied:
        """Why it ended: a user's mistake in its own words, or its status."""
        code = await self.wait()
        words = self.last_words()
        if code in EXIT_USER_ERRORS and words:
            return UserError(words, code=code)
        return ChildDied(f"{self.name} ended with status {code}; see its log")

    async def end(self, grace: float = 0.0) -> None:
        """Ask with SIGTERM when there is `grace` (seconds), then kill the whole session."""
        if self.running and grace > 0:
            self.process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(self.process.wait(), grace)
            except TimeoutError:
                pass  # it had its time; the kill below is what counts
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # nothing of the session is left
        await self.process.wait()
        if self._words >= 0:
            os.close(self._words)
            self._words = -1


def say_last_words(text: str) -> None:
    """Give the parent the reason of our end, and write it to stderr as a line "gyre: ..."."""
    with contextlib.suppress(OSError):  # the log is perhaps on the file system that is full
        print(f"gyre: {text}", file=sys.stderr, flush=True)
    given = os.environ.get(WORDS, "")
    if given.isdigit():
        with contextlib.suppress(OSError):  # nobody listens
            os.write(int(given), text.encode()[: WORDS_BYTES - 1] + b"\n")
