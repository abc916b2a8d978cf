"""Grades the snapshot of an execution: runs the task's tests over it and reads the reward.

Owns the grader's sandbox and the reading of rewards. Invariants: the tests exist in no sandbox but the
grader's, read-only; the reward comes from a folder that is fresh for each attempt; a missing, empty,
unreadable or non-finite reward is *no reward* (None), never 0.
"""

from __future__ import annotations

import json
import math
import os
import stat
import time
from pathlib import Path

from msgspec import Struct

from gyre.executions.ends import finish
from gyre.executions.layers import private_folder, remove_tree
from gyre.executions.limits import Limits
from gyre.executions.sandbox import Bind, Sandbox, SandboxFailure, SandboxSpec
from gyre.executions.tasks import Task

MOST_REWARD_BYTES = 65536
GRADED, FAILED, TIMED_OUT = "graded", "grader_failed", "grader_timeout"


class Grade(Struct, frozen=True, kw_only=True):
    """`reward` is None unless `reason` is "graded". `seconds` is wall time of the last attempt."""

    reward: float | None
    reason: str
    seconds: float
    detail: str = ""


class NoReward(Exception):
    """The grader left nothing that counts as a reward."""


async def grade(
    task: Task,
    sandbox: Sandbox,
    root: Path,
    snapshot: Path,
    folder: Path,
    limits: Limits,
    timeout: float | None = None,
) -> Grade:
    """Run the tests of `task` over `snapshot` once. `folder` is made, holds the grader's files and log, and
    stays.

    `root` keeps the shared layers; `timeout` is in seconds (None: the task's own). Never raises for what the
    tests do.
    """
    started = time.perf_counter()
    verifier, scratch = (private_folder(folder / name) for name in ("verifier", "scratch"))
    script = task.tests / "test.sh"
    spec = SandboxSpec(
        lowers=sandbox.lowers(root, task, snapshot),
        upper=None,
        scratch=scratch,
        workdir=task.workdir,
        argv=("/tests/test.sh",) if os.access(script, os.X_OK) else ("bash", "/tests/test.sh"),
        log=folder / "grader.log",
        binds=(Bind(task.tests, "/tests"), Bind(verifier, "/logs/verifier", writable=True)),
        env={**task.env, **task.verifier_env},
        limits=limits,
    )

    def result(reason: str, reward: float | None = None, detail: str = "") -> Grade:
        return Grade(reward=reward, reason=reason, seconds=time.perf_counter() - started, detail=detail)

    try:
        running = await sandbox.start(spec)
    except SandboxFailure as failure:
        return result(FAILED, detail=str(failure))
    try:
        status = await running.wait(task.verifier_timeout if timeout is None else timeout)
    finally:
        await finish(running.kill())
    if status.timed_out:
        return result(TIMED_OUT)
    if status.limit:
        return result(FAILED, detail=f"over its limit of {status.limit}")
    try:
        return result(GRADED, read_reward(verifier))
    except NoReward as error:
        return result(FAILED, detail=str(error))


async def grade_with_retries(
    task: Task,
    sandbox: Sandbox,
    root: Path,
    snapshot: Path,
    folder: Path,
    limits: Limits,
    timeout: float | None = None,
    attempts: int = 1,
) -> Grade:
    """`grade` up to `attempts` times, in `folder`/1, `folder`/2, ..., until there is a reward; the last
    grade.
    """
    for attempt in range(1, attempts + 1):
        remove_tree(folder / str(attempt))
        latest = await grade(task, sandbox, root, snapshot, folder / str(attempt), limits, timeout)
        if latest.reward is not None:
            break
    return latest


def read_reward(folder: Path) -> float:
    """The reward in `folder`: reward.json (the key "reward", else the mean of all values), else reward.txt.

    Raises NoReward for anything that is not a finite number. Links and special files are not opened.
    """
    text = _read_regular(folder / "reward.json")
    if text is not None:
        return _json_reward(text)
    text = _read_regular(folder / "reward.txt")
    if text is None:
        raise NoReward("the tests wrote neither reward.json nor reward.txt")
    try:
        return _finite(float(text))
    except ValueError as error:
        raise NoReward(f"reward.txt is not a number: {text[:100]!r}") from error


def _json_reward(text: str) -> float:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NoReward(f"reward.json is not JSON: {error}") from error
    if not isinstance(values, dict) or not values:
        raise NoReward("reward.json is not a flat object of numbers")
    numbers = {}
    for key, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise NoReward(f"reward.json: {key!r} is not a number")
        numbers[key] = _finite(value)
    return numbers["reward"] if "reward" in numbers else math.fsum(numbers.values()) / len(numbers)


def _finite(value: float) -> float:
    try:
        number = float(value)
    except OverflowError as error:
        raise NoReward("the reward is too large") from error
    if not math.isfinite(number):
        raise NoReward(f"the reward is {number}")
    return number


def _read_regular(path: Path) -> str | None:
    """The text of a small regular file; None when there is none. Raises NoReward for anything else."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise NoReward(f"{path.name} cannot be read: {error.strerror}") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MOST_REWARD_BYTES:
            raise NoReward(f"{path.name} is not a small regular file")
        return os.read(fd, MOST_REWARD_BYTES).decode()
    except UnicodeDecodeError as error:
        raise NoReward(f"{path.name} is not text") from error
    finally:
        os.close(fd)
