"""The sandboxes that hold a command in namespaces of its own, whichever tool makes them.

Owns what these kinds share: their layers, the words of the launcher, the start of one sandbox and the check of the
machine. A kind is how its tool is called (`launch`) and what must lie where for it (`lay_out`). Invariants: nothing but
the handed-out listening socket connects a sandbox to a network; a sandbox dies with the thread that started it (the
parent-death signal belongs to a thread: start from one that lives on, such as the main thread with its event loop); the
environment, which holds a key, reaches the launcher by a socket: no command line, file or tool sees it.
"""

from __future__ import annotations

import platform
import socket
import subprocess
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

from msgspec import structs

from gyre.errors import UserError
from gyre.executions.ends import CappedLog, finish
from gyre.executions.host_python import PYTHON, host_python
from gyre.executions.images.store import unpacked
from gyre.executions.layers import base_layer, dressing_layer, guard_layer, private_folder, remove_tree, seed_layer
from gyre.executions.running import START_TIMEOUT, RunningNamespace
from gyre.executions.sandbox import SandboxFailure, SandboxSpec, with_before
from gyre.executions.tasks import Task
from gyre.executions.users import User, find_user, user_layer, writable_places
from gyre.ledger.files import errno_of

PORT = 8400
"""Inside, the loopback is the sandbox's own: every sandbox can use the same port."""
READ_ONLY_PROC = ("sys", "sysrq-trigger", "irq", "bus", "fs", "acpi", "scsi", "mtrr", "pressure")
HIDDEN_PROC = ("kcore", "keys", "timer_list", "sched_debug", "latency_stats")
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
DEVICE_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
}
"""A minimal /dev, for tools that make none."""
LAUNCHER = "/run/gyre/launcher.py"
"""Where a kind shows gyre/executions/launcher.py inside, read-only."""


class NamespacedSandbox(ABC):
    """Starts commands in namespaces that one tool makes."""

    kind: str
    tool: ClassVar[str]
    """Its program's name, for messages."""
    advice: ClassVar[str] = (
        "allow user namespaces (sysctl kernel.unprivileged_userns_clone=1), "
        'or set sandbox.kind = "process" for trusted tasks'
    )
    """What to do where it does not work."""

    @abstractmethod
    def launch(self, spec: SandboxSpec, channel: int, log: int) -> subprocess.Popen[bytes]:
        """Start the tool on `spec`, laid out before. It must hand the descriptor `channel` down to
        `launcher_words(spec, channel)`, the first program inside, below a pid 1 of its namespace; standard output and
        error are the descriptor `log`. The tool sees no variable of the task: the launcher gets them by its channel.
        Raises OSError.
        """

    def lay_out(self, spec: SandboxSpec) -> SandboxSpec:
        """Make what the tool wants to find for `spec`. Raises OSError."""
        return spec

    def open_listener(self) -> tuple[int, socket.socket | None]:
        return PORT, None

    def lowers(
        self, root: Path, task: Task, below: tuple[Path, ...] = (), snapshot: Path | None = None
    ) -> tuple[Path, ...]:
        layers = (*self._environment(root, task), *below)
        return (*layers, snapshot, guard_layer(root, task.workdir, task.on_image)) if snapshot else layers

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

    async def start(self, spec: SandboxSpec) -> RunningNamespace:
        """Start `spec` and return when its launcher is ready and known by pidfd. Raises SandboxFailure."""
        try:
            spec = self.lay_out(spec)
        except OSError as error:
            raise SandboxFailure(f"cannot lay out the workspace: {error}") from error
        log = CappedLog(spec.log, spec.limits.log)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        try:
            outer = self.launch(spec, theirs.fileno(), log.write_end)
        except BaseException as error:
            log.finish()
            ours.close()
            if isinstance(error, OSError):
                raise SandboxFailure(f"cannot start {self.tool}: {error}") from error
            raise
        finally:
            theirs.close()
            log.close_write_end()
        running = RunningNamespace(self.tool, spec, outer, log)
        try:
            await running.become_ready(ours)
        except BaseException:
            await finish(running.abandon(ours))
            raise
        finally:
            ours.close()
        return running


def launcher_words(spec: SandboxSpec, channel: int) -> list[str]:
    """The first program inside, with its arguments: where there is an image, by the host's Python. Raises UserError."""
    python = host_python() if spec.image else (PYTHON,)
    return [*python, "-I", "-S", LAUNCHER, str(channel), *after_channel(spec)]


def after_channel(spec: SandboxSpec) -> list[str]:
    """The launcher's arguments after the channel. Raises UserError."""
    limits = spec.limits
    numbers = (spec.listen_port, limits.open_files, process_limit(limits.processes), limits.disk)
    return [*map(str, numbers), *command(spec)]


def command(spec: SandboxSpec) -> tuple[str, ...]:
    """What the launcher becomes: where it is the system's Python, an image is given the host's. Raises UserError."""
    hosts = spec.image and spec.argv[0] == PYTHON
    return with_before(spec, (*host_python(), *spec.argv[1:]) if hosts else spec.argv)


def hides_root(spec: SandboxSpec) -> bool:
    """Whether /root is closed: for another user than root, unless one of its places lies there."""
    return spec.user is not None and not any(
        place.split("/")[1] == "root" for place in writable_places(spec.user, spec.workdir)
    )


def process_limit(processes: int) -> int:
    """RLIMIT_NPROC for the launcher, or -1 where it would count this user's processes outside the sandbox
    too.

    Since Linux 5.14 the count belongs to the user namespace. (It never binds the machine's root: `TaskCap` and the
    watchdog do.)
    """
    major, minor = (int("".join(filter(str.isdigit, part)) or 0) for part in platform.release().split(".")[:2])
    return processes if (major, minor) >= (5, 14) else -1


def with_user(spec: SandboxSpec) -> SandboxSpec:
    """`spec` with the layer and the folders that another user than root needs: `scratch` gets one for each of its
    places, called by its number, and `upper` the places themselves. Raises OSError.
    """
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


async def check_host(sandbox: NamespacedSandbox, folder: Path) -> None:
    """Run `true` with and, where that fails, without an upper layer in `folder`. Raises UserError saying what
    is amiss.
    """
    private_folder(folder)
    if not Path(PYTHON).exists():
        raise UserError(f"the {sandbox.kind} sandbox needs {PYTHON} (Debian: apt install python3-minimal)")
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
        raise UserError(f"{sandbox.kind} does not work on this machine ({failure}); {sandbox.advice}", code=1)
    finally:
        remove_tree(trial)


async def _trial(sandbox: NamespacedSandbox, folder: Path, overlay: bool) -> str:
    """What went wrong when a file was written in one, or ""."""
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
