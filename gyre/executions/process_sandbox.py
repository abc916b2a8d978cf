"""The `process` sandbox: no isolation at all, for trusted tasks where bubblewrap cannot run.

Owns plain child processes that look like sandboxed ones: the task's files are copied into the upper folder,
the command runs there with `GYRE_ROOT` naming it, and paths inside that appear as words of the command or as
values of variables become host paths. Scripts of such tasks write `$GYRE_ROOT/logs/verifier/reward.txt`.
Invariant: `kill` ends every process that still carries the sandbox's mark in its environment; one that erases
it escapes, hence "trusted".
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import socket
import subprocess
from pathlib import Path

from gyre.executions.ends import CappedLog, ProcessEnd
from gyre.executions.layers import private_folder, seed_layer
from gyre.executions.limits import watch
from gyre.executions.marks import Looks, environment_of, look_for
from gyre.executions.sandbox import PATH, ExitStatus, SandboxFailure, SandboxSpec, with_before
from gyre.executions.tasks import Task
from gyre.executions.users import ROOT, User

MARK = "GYRE_SANDBOX"
DOUBTFUL_LOOKS = 3
"""A look that met a process without an environment proves nothing; so many in a row prove enough."""
LOOK_PAUSE = 0.005


class ProcessSandbox:
    """Starts commands as plain processes on the host, with the host's network."""

    kind = "process"

    def __init__(self) -> None:
        self._looks = Looks(lambda: look_for(MARK))

    def open_listener(self) -> tuple[int, socket.socket | None]:
        listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        return listener.getsockname()[1], listener

    def lowers(
        self, root: Path, task: Task, below: tuple[Path, ...] = (), snapshot: Path | None = None
    ) -> tuple[Path, ...]:
        if task.image is not None:
            raise OSError(f"the process sandbox has the host's system only, and {task.name} lies on an image")
        if task.separate:
            raise OSError(f"the process sandbox has no separate verifier, and {task.name} wants one")
        return (*below, snapshot) if snapshot else (seed_layer(root, task), *below)

    def user(self, root: Path, task: Task, name: str) -> User | None:
        if name not in ROOT:
            raise OSError(f"the process sandbox has one user, and {task.name} wants {name!r}")
        return None

    async def start(self, spec: SandboxSpec) -> RunningProcess:
        """Copy the layers and start the command. Raises SandboxFailure."""
        root = spec.upper or private_folder(spec.scratch / "root")
        try:
            await asyncio.to_thread(_lay_out, root, spec)
        except (OSError, shutil.Error) as error:
            raise SandboxFailure(f"cannot lay out the workspace: {error}") from error
        mark = secrets.token_hex(16)
        env = {"PATH": PATH, "HOME": str(root / "root"), "LANG": "C.UTF-8"}
        env |= {name: _outside(value, root, spec) for name, value in spec.env.items()}
        env |= {"GYRE_ROOT": str(root), MARK: mark}
        log = CappedLog(spec.log, spec.limits.log)
        try:
            child = subprocess.Popen(
                [_outside(word, root, spec) for word in with_before(spec, spec.argv)],
                stdin=subprocess.DEVNULL,
                stdout=log.write_end,
                stderr=log.write_end,
                env=env,
                cwd=root / spec.workdir.lstrip("/"),
                start_new_session=True,
            )
        except OSError as error:
            log.finish()
            raise SandboxFailure(f"cannot start {spec.argv[0]}: {error}") from error
        log.close_write_end()
        return RunningProcess(spec, child, log, mark, root, self._looks)


class RunningProcess:
    """A plain process and all that carry its mark."""

    def __init__(
        self,
        spec: SandboxSpec,
        child: subprocess.Popen[bytes],
        log: CappedLog,
        mark: str,
        root: Path,
        looks: Looks,
    ) -> None:
        self.listener = spec.listener
        self._child = child
        self._end = ProcessEnd(child.pid)
        self._log = log
        self._mark = mark
        self._looks = looks
        self._root = root
        self._limit = ""
        self._dead = False
        self._watchdog = asyncio.create_task(watch(child.pid, root, spec.limits, self._over_limit))

    def _over_limit(self, limit: str) -> None:
        self._limit = limit
        self._end.kill()

    async def wait(self, timeout: float) -> ExitStatus:
        try:
            await asyncio.wait_for(self._end.wait(), timeout)
        except TimeoutError:
            return ExitStatus(timed_out=True)
        code = self._child.wait()
        if self._limit:
            return ExitStatus(signal=9, limit=self._limit)
        return ExitStatus(signal=-code) if code < 0 else ExitStatus(code=code)

    async def kill(self) -> None:
        if self._dead:
            return
        self._watchdog.cancel()
        self._end.kill()
        await self._end.wait()
        self._child.wait()
        doubts = 0
        while doubts < DOUBTFUL_LOOKS:
            look = await self._looks.look()
            if found := look.marked.get(self._mark):
                await self._end_all(found)
                doubts = 0
            elif look.doubtful:
                doubts += 1
                await asyncio.sleep(LOOK_PAUSE)
            else:
                break
        self._dead = True
        self._end.close()
        self._log.finish()

    async def _end_all(self, pids: list[int]) -> None:
        ends = [end for pid in pids if (end := _process(pid, self._mark)) is not None]
        for end in ends:
            end.kill()
        for end in ends:
            await end.wait()
            end.close()

    def snapshot(self, target: Path) -> Path:
        if not self._dead:
            raise RuntimeError("a snapshot needs a dead sandbox")
        return self._root.rename(target)


def _process(pid: int, mark: str) -> ProcessEnd | None:
    """The process of this number, if it still carries the mark (the number may have got a new owner)."""
    try:
        end = ProcessEnd(pid)
    except ProcessLookupError:
        return None
    if f"{MARK}={mark}".encode() in environment_of(pid).split(b"\0"):
        return end
    end.close()
    return None


def _outside(word: str, root: Path, spec: SandboxSpec) -> str:
    """A word that names a bound path or the workdir, as the host names it; any other word as it is."""
    for bind in spec.binds:
        if word == bind.target or word.startswith(bind.target + "/"):
            return str(bind.source) + word[len(bind.target) :]
    if word == spec.workdir or word.startswith(spec.workdir + "/"):
        return str(root) + word
    return word


def _lay_out(root: Path, spec: SandboxSpec) -> None:
    for lower in () if spec.resumed else spec.lowers:
        shutil.copytree(lower, root, symlinks=True, dirs_exist_ok=True)
    for name in ("root", "tmp", "logs/agent", spec.workdir.lstrip("/")):
        (root / name).mkdir(parents=True, exist_ok=True)
    for bind in spec.binds:
        place = root / bind.target.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        if spec.resumed and place.is_symlink():
            place.unlink()  # it leads to what an earlier sandbox was shown
        if not place.is_symlink() and not place.exists():
            place.symlink_to(bind.source)
