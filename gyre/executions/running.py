"""One started sandbox that is a pid namespace, whichever tool made it.

Owns its life from the launcher's first word to the snapshot. Invariant: `kill` returns only when the pid namespace is
dead, so a snapshot cannot change any more.

Its pid 1 is found from inside, so that no tool need say it: the kernel writes the launcher's pid, as this process's
namespace numbers it, beside the launcher's first word, and pid 1 is that process or one that it descends from.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

from gyre.executions.ends import CappedLog, ProcessEnd, readable
from gyre.executions.limits import watch
from gyre.executions.sandbox import PATH, ExitStatus, SandboxFailure, SandboxSpec
from gyre.executions.task_cap import TaskCap

START_TIMEOUT = 60.0
PATIENCE = 10.0
"""Seconds for a start that nobody wants any more to come to its end."""
CREDENTIALS = struct.Struct("=iii")
"""The kernel's `struct ucred`: pid, uid, gid."""


def receive_ready(channel: socket.socket) -> tuple[bytes, socket.socket | None, int]:
    """The launcher's first word, its listening socket and its pid. The channel has SO_PASSCRED and can be read."""
    room = socket.CMSG_SPACE(CREDENTIALS.size) + socket.CMSG_SPACE(4)
    message, control, _, _ = channel.recvmsg(1, room, socket.MSG_CMSG_CLOEXEC)
    listener, pid = None, 0
    for _, kind, data in control:
        if kind == socket.SCM_RIGHTS:
            listener = socket.socket(fileno=int.from_bytes(data[:4], sys.byteorder))
        elif kind == socket.SCM_CREDENTIALS:
            pid, _, _ = CREDENTIALS.unpack(data[: CREDENTIALS.size])
    return message, listener, pid


def status_of(pid: int) -> tuple[int, list[int]]:
    """A process's parent and its own numbers from this process's pid namespace down. Raises ProcessLookupError."""
    try:
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    except FileNotFoundError:
        raise ProcessLookupError(pid) from None
    return int(fields["PPid"]), [int(number) for number in fields["NSpid"].split()]


def first_processes(pid: int) -> tuple[int, int]:
    """pid 1 of the outermost namespace below ours that `pid` is in, whose end is everybody's, and of the innermost
    (with most tools the same). Raises ProcessLookupError when `pid` has ended, or is in ours.
    """
    found = []
    while pid:
        parent, numbers = status_of(pid)
        if len(numbers) < 2:
            break
        if numbers[-1] == 1:
            found.append(pid)
        pid = parent
    if not found:
        raise ProcessLookupError(pid)
    return found[-1], found[0]


async def end_tree(root: int) -> None:
    """SIGKILL `root`, a child of ours, and all that descend from it now; returns when they have ended."""
    found = [root]
    for pid in found:
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                found.extend(map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split()))
    ends = []
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            ends.append(ProcessEnd(pid))
    for end in ends:
        end.kill()
    for end in ends:
        await end.wait()
        end.close()


def environment(spec: SandboxSpec) -> dict[str, str]:
    """All variables inside."""
    user = spec.user
    names = {"USER": user.name, "LOGNAME": user.name} if user is not None and user.name else {}
    home = user.home if user is not None else "/root"
    return {"PATH": PATH, "HOME": home, "LANG": "C.UTF-8", **names, **spec.env}


class RunningNamespace:
    """One started sandbox.

    `_inner`, a pid 1, is the namespace: when that has ended, everything has. `_outer` is the tool.
    """

    def __init__(self, tool: str, spec: SandboxSpec, outer: subprocess.Popen[bytes], log: CappedLog) -> None:
        self.listener: socket.socket | None = None
        self._tool = tool
        self._spec = spec
        self._outer = outer
        self._outer_end = ProcessEnd(outer.pid)
        self._inner: ProcessEnd | None = None
        self._log = log
        self._limit = ""
        self._watchdog: asyncio.Task[None] | None = None
        self._cap: TaskCap | None = None
        self._dead = False

    async def become_ready(self, channel: socket.socket) -> None:
        """Take the listening socket, know pid 1 by pidfd, and let the launcher go on.

        Raises SandboxFailure.
        """
        channel.setblocking(False)
        if not await readable(channel.fileno(), START_TIMEOUT):
            raise SandboxFailure(f"the sandbox was not ready within {START_TIMEOUT:.0f} s")
        message, self.listener, pid = receive_ready(channel)
        if message != b"r":
            raise SandboxFailure(f"{self._tool} failed: {await self._first_error()}")
        # The launcher waits for our word, so its pid 1 has not ended: the number is still its own. Unless somebody
        # (the kernel, an administrator) killed it just now: then it was not the task's doing, and is tried again.
        try:
            outermost, innermost = first_processes(pid)
            self._inner = ProcessEnd(outermost)
        except ProcessLookupError:
            raise SandboxFailure("the sandbox was killed while it started") from None
        # What the tool itself takes is not the task's: the watchdog looks below the last pid 1, the cap at what comes.
        self._cap = TaskCap.around(pid, self._spec.limits.processes)
        self._watchdog = asyncio.create_task(watch(innermost, self._spec.upper, self._spec.limits, self._over_limit))
        text = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment(self._spec).items())
        try:
            await asyncio.get_running_loop().sock_sendall(channel, b"g" + len(text).to_bytes(4, "big") + text)
        except (BrokenPipeError, ConnectionResetError):
            raise SandboxFailure("the sandbox was killed while it started") from None

    def _over_limit(self, limit: str) -> None:
        self._limit = limit
        if self._inner is not None:
            self._inner.kill()

    async def _first_error(self) -> str:
        await self._outer_end.wait()
        self._log.finish()
        lines = self._spec.log.read_text(errors="replace").strip().splitlines()
        return lines[0][:500] if lines else f"exit code {self._outer.wait()}"

    async def abandon(self, channel: socket.socket) -> None:
        """End a sandbox that did not become ready: by its pid 1, which its launcher's word tells if it comes to that,
        else process by process (a tool that is killed half-way may leave one that waits for it for ever).
        """
        if self._inner is None and self.listener is None:
            if await readable(channel.fileno(), PATIENCE):
                _, self.listener, pid = receive_ready(channel)
                with contextlib.suppress(ProcessLookupError):
                    self._inner = ProcessEnd(first_processes(pid)[0])
            else:
                await end_tree(self._outer.pid)
        await self.kill()
        if self.listener is not None:
            self.listener.close()

    async def wait(self, timeout: float) -> ExitStatus:
        try:
            await asyncio.wait_for(self._outer_end.wait(), timeout)
        except TimeoutError:
            return ExitStatus(timed_out=True)
        code = self._outer.wait()
        if self._limit:
            return ExitStatus(signal=9, limit=self._limit)
        if code < 0 or code > 128:
            return ExitStatus(signal=-code if code < 0 else code - 128)
        return ExitStatus(code=code)

    async def kill(self) -> None:
        if self._dead:
            return
        if self._watchdog is not None:
            self._watchdog.cancel()
        if self._inner is not None:
            self._inner.kill()
            await self._inner.wait()
        self._outer_end.kill()
        await self._outer_end.wait()
        self._outer.wait()
        self._dead = True
        for end in (self._inner, self._outer_end):
            if end is not None:
                end.close()
        if self._cap is not None:
            self._cap.remove()
        self._log.finish()

    def snapshot(self, target: Path) -> Path:
        if not self._dead or self._spec.upper is None:
            raise RuntimeError("a snapshot needs an upper folder and a dead sandbox")
        return self._spec.upper.rename(target)
