"""What a separate verifier sees of an execution: its declared artifacts, and nothing else.

Owns the collecting. Invariant: the copy is made inside a sandbox on the snapshot, so no link of the execution leads out
of it; what it yields is a layer with the artifacts at their own places.
"""

from __future__ import annotations

from pathlib import Path

from gyre.executions.ends import finish, last_words
from gyre.executions.layers import private_folder
from gyre.executions.limits import Limits
from gyre.executions.sandbox import Bind, Sandbox, SandboxFailure, SandboxSpec
from gyre.executions.tasks import Task

CONVENTION = "/logs/artifacts"
"""Always collected, as by Harbor."""
TARGET = "/run/gyre/artifacts"
COPY = f"""
for path in "$@"; do
    [[ -e $path || -L $path ]] || continue
    cp -a --parents -- "$path" {TARGET} || exit
done
"""


async def collect(
    task: Task,
    sandbox: Sandbox,
    root: Path,
    snapshot: Path,
    folder: Path,
    limits: Limits,
    timeout: float,
    below: tuple[Path, ...] = (),
) -> Path:
    """A layer with the artifacts of `snapshot`, which lies on the layers `below`, in the new `folder`.

    Raises SandboxFailure when they cannot be collected.
    """
    layer, scratch = (private_folder(folder / name) for name in ("layer", "scratch"))
    layer.chmod(0o755)
    paths = [path if path.startswith("/") else f"{task.workdir}/{path}" for path in (CONVENTION, *task.artifacts)]
    running = await sandbox.start(
        SandboxSpec(
            lowers=sandbox.lowers(root, task, below, snapshot),
            upper=None,
            scratch=scratch,
            workdir="/",
            argv=("bash", "-c", COPY, "collect", *paths),
            log=folder / "log",
            binds=(Bind(layer, TARGET, writable=True),),
            limits=limits,
            image=task.on_image,
        )
    )
    try:
        status = await running.wait(timeout)
    finally:
        await finish(running.kill())
    if status.code != 0:
        raise SandboxFailure(f"the artifacts could not be collected ({status}): {last_words(folder / 'log')}")
    return layer
