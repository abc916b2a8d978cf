"""What a sandbox is, whatever its kind: a command with layers, limits and an end that leaves nothing behind.

Owns the interface (`Sandbox`, `RunningSandbox`, `SandboxSpec`, `ExitStatus`) and the choice of a kind.
Invariant of every kind: after `kill` returns, no process of the sandbox lives (for `process`: none that could
be found), and only then is there a snapshot.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Protocol

from msgspec import Struct, field

from gyre.errors import UserError
from gyre.executions.limits import Limits
from gyre.executions.tasks import Task
from gyre.executions.users import User

PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"


class SandboxFailure(Exception):
    """The sandbox itself did not start or broke.

    Not the task's fault, nor the user's: the execution is tried again.
    """


class Bind(Struct, frozen=True):
    """A host path seen at `target` inside; read-only unless `writable`."""

    source: Path
    target: str
    writable: bool = False


class SandboxSpec(Struct, frozen=True, kw_only=True):
    """Everything that one sandboxed command needs.

    `lowers` are read-only layers, the lowest first. `upper` receives all changes; it must exist, and be empty or what
    an earlier sandbox on the same layers left (`resumed`). None: the changes are thrown away. `listen_port` 0: no
    listening socket.
    """

    lowers: tuple[Path, ...]
    upper: Path | None
    scratch: Path
    """An existing empty folder on the same file system as `upper`, for the sandbox's own use."""
    workdir: str
    argv: tuple[str, ...]
    log: Path
    binds: tuple[Bind, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    listen_port: int = 0
    listener: socket.socket | None = None
    """A socket that `open_listener` made on the host, for kinds that share the host's network."""
    limits: Limits = Limits()
    before: str = ""
    """Bash that comes first, in the same sandbox: the command follows unless it exits."""
    resumed: bool = False
    user: User | None = None
    """Who runs the command; None: root."""
    image: bool = False
    """The lowest layer is a whole system of its own; otherwise the host's is bound in."""


class ExitStatus(Struct, frozen=True):
    """How the command ended. A shell's 128 + N is reported as signal N: the two cannot be told apart."""

    code: int | None = None
    signal: int | None = None
    timed_out: bool = False
    limit: str = ""
    """The limit that the watchdog killed it for."""


def with_before(spec: SandboxSpec, argv: tuple[str, ...]) -> tuple[str, ...]:
    """`argv` behind what comes first."""
    return ("bash", "-c", f'{spec.before}\nexec "$@"', "before", *argv) if spec.before else argv


class RunningSandbox(Protocol):
    """A started command. `kill` must be called in the end, on every path."""

    listener: socket.socket | None
    """The listening socket, from inside the sandbox's network; the caller owns it and closes it."""

    async def wait(self, timeout: float) -> ExitStatus:
        """Wait until the command itself ends, at most `timeout` seconds. Kills nothing."""

    async def kill(self) -> None:
        """SIGKILL everything in the sandbox and return when nothing of it lives. May be called again."""

    def snapshot(self, target: Path) -> Path:
        """Move the upper folder to `target` (a name that does not exist) and return it. Only after `kill`."""


class Sandbox(Protocol):
    kind: str

    def open_listener(self) -> tuple[int, socket.socket | None]:
        """The port that a harness will find its model at, and the socket where the kind needs one made
        beforehand.
        """

    def lowers(
        self, root: Path, task: Task, below: tuple[Path, ...] = (), snapshot: Path | None = None
    ) -> tuple[Path, ...]:
        """The layers for an execution of `task` that goes on above the layers `below` of earlier sessions, or, with its
        `snapshot`, for grading it. Layers are kept in `root`.

        Raises OSError when a layer cannot be built.
        """

    def user(self, root: Path, task: Task, name: str) -> User | None:
        """Who `name` is in the environment of `task`; None: root. Raises OSError for one that is not there."""

    async def start(self, spec: SandboxSpec) -> RunningSandbox:
        """Start the command.

        Raises SandboxFailure. Call it from a thread that lives as long as the sandbox.
        """


async def make_sandbox(kind: str, folder: Path) -> Sandbox:
    """The sandbox of this kind, checked once by running `true` with its upper folder in `folder`.

    Raises UserError when the kind cannot work on this machine or in this folder.
    """
    if kind == "process":
        from gyre.executions.process_sandbox import ProcessSandbox

        return ProcessSandbox()
    from gyre.executions.namespaced import NamespacedSandbox, check_host

    held: NamespacedSandbox
    if kind == "bubblewrap":
        from gyre.executions.bubblewrap import Bubblewrap

        held = Bubblewrap()
    elif kind == "apptainer":
        from gyre.executions.apptainer import Apptainer

        held = Apptainer()
    elif kind == "enroot":
        from gyre.executions.enroot import Enroot

        held = Enroot()
    else:
        raise UserError(f"{kind} is no kind of sandbox: bubblewrap, apptainer, enroot or process")
    await check_host(held, folder)
    return held
