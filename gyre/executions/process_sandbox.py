"""The `process` sandbox: no isolation at all, for trusted tasks where bubblewrap cannot run.

Owns plain child processes that look like sandboxed ones: the task's files are copied into the upper folder,
the command runs there with `GYRE_ROOT` naming it, and paths inside that appear as words of the command or as
values of variables become host paths. Scripts of such tasks write `$GYRE_ROOT/logs/verifier/reward.txt`.
Invariant: `kill` ends every process that still carries the sandbox's mark in its environment; one that erases
it escapes, hence "trusted".
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import socket
import subprocess
from pathlib import Path

from gyre.executions.ends import CappedLog, ProcessEnd
from gyre.executions.layers import private_folder, seed_layer
from gyre.executions.limits import watch
from gyre.executions.sandbox import PATH, ExitStatus, SandboxFailure, SandboxSpec
from gyre.executions.tasks import Task

MARK = "GYRE_SANDBOX"
CLEAN_SCANS = 3
"""A process shows no environment while it forks or execs: one scan that finds nothing does not prove much."""
SCAN_PAUSE = 0.005


class ProcessSandbox:
    """Starts commands as plain processes on the host, with the host's network."""

    kind = "process"

    def open_listener(self) -> tuple[int, socket.socket | None]:
        listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        return listener.getsockname()[1], listener

    def lowers(self, root: Path, task: Task, snapshot: Path | None = None) -> tuple[Path, ...]:
        return (snapshot,) if snapshot else (seed_layer(root, task),)

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
                [_outside(word, root, spec) for word in spec.argv],
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
        return RunningProcess(spec, child, log, mark, root)


class RunningProcess:
    """A plain process and all that carry its mark."""

    def __init__(
        self, spec: SandboxSpec, child: subprocess.Popen[bytes], log: CappedLog, mark: str, root: Path
    ) -> None:
        self.listener = spec.listener
        self._child = child
        self._end = ProcessEnd(child.pid)
        self._log = log
        self._mark = f"{MARK}={mark}".encode()
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
        clean = 0
        while clean < CLEAN_SCANS:
            marked = _marked(self._mark)
            for end in marked:
                end.kill()
                await end.wait()
                end.close()
            clean = 0 if marked else clean + 1
            await asyncio.sleep(SCAN_PAUSE)
        self._dead = True
        self._end.close()
        self._log.finish()

    def snapshot(self, target: Path) -> Path:
        if not self._dead:
            raise RuntimeError("a snapshot needs a dead sandbox")
        return self._root.rename(target)


def _marked(mark: bytes) -> list[ProcessEnd]:
    """Live processes of this user whose environment holds `mark`."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            end = ProcessEnd(int(name))
        except ProcessLookupError:
            continue
        try:
            environment = Path("/proc", name, "environ").read_bytes()
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            environment = b""
        if mark in environment.split(b"\0"):
            found.append(end)
        else:
            end.close()
    return found


def _outside(word: str, root: Path, spec: SandboxSpec) -> str:
    """A word that names a bound path or the workdir, as the host names it; any other word as it is."""
    for bind in spec.binds:
        if word == bind.target or word.startswith(bind.target + "/"):
            return str(bind.source) + word[len(bind.target) :]
    if word == spec.workdir or word.startswith(spec.workdir + "/"):
        return str(root) + word
    return word


def _lay_out(root: Path, spec: SandboxSpec) -> None:
    for lower in spec.lowers:
        shutil.copytree(lower, root, symlinks=True, dirs_exist_ok=True)
    for name in ("root", "tmp", "logs/agent", spec.workdir.lstrip("/")):
        (root / name).mkdir(parents=True, exist_ok=True)
    for bind in spec.binds:
        place = root / bind.target.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        if not place.is_symlink() and not place.exists():
            place.symlink_to(bind.source)
