"""Grades the snapshot of an execution: runs the task's tests over it and takes the reward from what they leave.

Owns the grader's sandbox. Invariants: the tests exist in no sandbox but the grader's, read-only; the reward comes from
a folder that is fresh for each attempt; what is no valid reward is None, never 0.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from pathlib import Path

from msgspec import Struct, field, structs

from gyre.executions.artifacts import collect
from gyre.executions.backoff import pause_before
from gyre.executions.ends import finish, last_words
from gyre.executions.layers import private_folder, remove_tree
from gyre.executions.limits import Limits
from gyre.executions.rewards import NoReward, environment, rewards_of
from gyre.executions.sandbox import Bind, Sandbox, SandboxFailure, SandboxSpec
from gyre.executions.steps import one_number
from gyre.executions.tasks import Task

INSIDE = "/run/gyre/"
"""Where the sandbox shows a script that does not lie in tests/."""
GRADED, FAILED, TIMED_OUT = "graded", "grader_failed", "grader_timeout"


class Grade(Struct, frozen=True, kw_only=True):
    """`reward` is None unless `reason` is "graded". `seconds` is wall time of the last attempt."""

    reward: float | None
    reason: str
    seconds: float
    detail: str = ""
    rewards: dict[str, float] = field(default_factory=dict)
    """All that the grader gave, by name: what `reward` was made of."""


async def grade(
    task: Task,
    sandbox: Sandbox,
    root: Path,
    snapshot: Path,
    folder: Path,
    limits: Limits,
    timeout: float | None = None,
    below: tuple[Path, ...] = (),
) -> Grade:
    """Run the tests of `task` over `snapshot` once. `folder` is made, holds the grader's files and log, and
    stays.

    `below`: layers that the snapshot lies on, above those of the task. `root` keeps the shared layers; `limits` are
    narrowed to those of the environment that it is graded in; `timeout` is in seconds (None: the task's own). Never
    raises for what the tests do.
    """
    started = time.perf_counter()
    place = task.grader
    limits = limits.narrowed(place.memory, place.storage)
    verifier, scratch = (private_folder(folder / name) for name in ("verifier", "scratch"))
    seconds = task.verifier_timeout if timeout is None else timeout

    def result(reason: str, reward: float | None = None, detail: str = "") -> Grade:
        return Grade(reward=reward, reason=reason, seconds=time.perf_counter() - started, detail=detail)

    try:
        argv, binds = await asyncio.to_thread(test_command, task, folder / "tests")
        if task.separate:
            snapshot = await collect(task, sandbox, root, snapshot, folder / "artifacts", limits, seconds, below)
            below = ()
        user = sandbox.user(root, place, place.verifier_user)
    except (SandboxFailure, OSError, shutil.Error) as failure:
        return result(FAILED, detail=str(failure))
    spec = SandboxSpec(
        lowers=sandbox.lowers(root, place, below, snapshot),
        upper=None,
        scratch=scratch,
        workdir=place.workdir,
        argv=argv,
        log=folder / "grader.log",
        binds=(*binds, Bind(verifier, "/logs/verifier", writable=True)),
        env={**place.env, **environment(task), **task.verifier_env},
        limits=limits,
        image=place.on_image,
        user=user,
    )

    try:
        running = await sandbox.start(spec)
    except SandboxFailure as failure:
        return result(FAILED, detail=str(failure))
    try:
        status = await running.wait(seconds)
    finally:
        await finish(running.kill())
    if status.timed_out:
        return result(TIMED_OUT)
    if status.limit:
        return result(FAILED, detail=f"over its limit of {status.limit}")
    try:
        rewards = rewards_of(task, verifier)
        return structs.replace(result(GRADED, one_number(rewards)), rewards=rewards)
    except NoReward as error:
        said = last_words(spec.log)
        return result(FAILED, detail=f"{error}; the last line of the tests' output: {said}" if said else str(error))


def test_command(task: Task, place: Path) -> tuple[tuple[str, ...], tuple[Bind, ...]]:
    """What the grader runs, and what it sees of the task's folder; where that is several folders in one, they are
    copied to `place`, which is made. Raises OSError and shutil.Error.
    """
    layers, script = task.test_layers, task.folder / task.test_file
    shown = layers[-1] if layers else task.tests
    if len(layers) > 1:
        shown = private_folder(place)
        for layer in layers:
            shutil.copytree(layer, shown, symlinks=True, dirs_exist_ok=True)
        script = next((shown / script.relative_to(layer) for layer in layers if script.is_relative_to(layer)), script)
    if task.test_text:
        return ("bash", "-c", task.test_text), (Bind(shown, "/tests"),) if layers else ()
    if task.own_verifier is not None and not script.is_file():
        return ("bash", f"/tests/{script.name}"), ()  # its image has the tests
    return script_command(script, shown, "/tests")


def script_command(script: Path, folder: Path, shown: str) -> tuple[tuple[str, ...], tuple[Bind, ...]]:
    """How a script runs, with `folder` (if there is one) shown at `shown`; one that lies elsewhere is bound in."""
    binds = (Bind(folder, shown),) if folder.is_dir() else ()
    if script.is_relative_to(folder):
        inside = f"{shown}/{script.relative_to(folder)}"
    else:
        inside = INSIDE + script.name
        binds = (*binds, Bind(script, inside))
    return (inside,) if os.access(script, os.X_OK) else ("bash", inside), binds


async def grade_with_retries(
    task: Task,
    sandbox: Sandbox,
    root: Path,
    snapshot: Path,
    folder: Path,
    limits: Limits,
    timeout: float | None = None,
    attempts: int = 1,
    below: tuple[Path, ...] = (),
) -> Grade:
    """`grade` up to `attempts` times, in `folder`/1, `folder`/2, ..., until there is a reward, with pauses
    that double; the last grade.
    """
    for attempt in range(1, attempts + 1):
        await asyncio.sleep(pause_before(attempt - 1))
        remove_tree(folder / str(attempt))
        latest = await grade(task, sandbox, root, snapshot, folder / str(attempt), limits, timeout, below)
        if latest.reward is not None:
            break
    return latest
