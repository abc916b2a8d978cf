"""From the files that a grader left to the reward: by name, built in or offered by another package.

Owns the registry (`file`, `junit`, `junit-all`, and the entry-point group `gyre.rewards`: a function
`(task, folder) -> float`) and the reading of the grader's files. Invariant: a missing, empty, unreadable or non-finite
reward is *no reward* (`NoReward`), never 0.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from xml.etree import ElementTree

from gyre.errors import UserError
from gyre.executions.steps import REWARD, one_number
from gyre.executions.tasks import Task

GROUP = "gyre.rewards"
MOST_REWARD_BYTES = 65536
MOST_REPORT_BYTES = 32 << 20

Reward = Callable[[Task, Path], float]


class NoReward(Exception):
    """The grader left nothing that counts as a reward."""


def find_reward(name: str) -> Reward:
    """The reward of this name. Raises UserError listing the known ones."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    offered = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in offered:
        raise UserError(f"tasks.reward = {name!r} is not known; known are {', '.join(sorted({*BUILT_IN, *offered}))}")
    found: Reward = offered[name].load()
    return found


def rewards_of(task: Task, folder: Path) -> dict[str, float]:
    """What the grader gives by the task's own rule: one number or more, by name. Raises as `reward_of`."""
    return read_rewards(folder) if task.reward == "file" else {REWARD: reward_of(task, folder)}


def reward_of(task: Task, folder: Path) -> float:
    """The reward by the task's own rule. Raises NoReward; UserError for a rule that nobody offers."""
    rule = find_reward(task.reward)
    if task.reward in BUILT_IN:
        return finite(rule(task, folder))
    try:
        return finite(rule(task, folder))
    except Exception as error:  # the code of another package: whatever it raises, this grading failed
        raise NoReward(f"{task.reward}: {type(error).__name__}: {error}") from error


def environment(task: Task) -> dict[str, str]:
    """What the grader's environment needs, so that the files of the task's rule are written."""
    return {"PYTEST_ADDOPTS": "--junitxml=/logs/verifier/junit.xml"} if task.reward.startswith("junit") else {}


def read_reward(folder: Path) -> float:
    """The reward in `folder`: of `read_rewards` the key "reward", else the mean of all. Raises NoReward."""
    return one_number(read_rewards(folder))


def read_rewards(folder: Path) -> dict[str, float]:
    """The rewards in `folder`: those of reward.json, else the one of reward.txt.

    Raises NoReward for anything that is not a finite number. Links and special files are not opened.
    """
    text = _read_regular(folder / "reward.json")
    if text is not None:
        return _json_rewards(text)
    text = _read_regular(folder / "reward.txt")
    if text is None:
        raise NoReward("the tests wrote neither reward.json nor reward.txt")
    try:
        return {REWARD: finite(float(text))}
    except ValueError as error:
        raise NoReward(f"reward.txt is not a number: {text[:100]!r}") from error


def pass_rate(folder: Path, expected: int = 0) -> float:
    """Passed tests over `expected` (0: over those that ran), at most 1, from the JUnit reports in `folder`.

    A test counts once, by its name; a skipped one is not passed. Raises NoReward without a readable report, or when no
    test ran and none was expected.
    """
    verdicts: dict[str, bool] = {}
    reports = sorted(path for path in folder.iterdir() if path.name.startswith("junit") and path.suffix == ".xml")
    if not reports:
        raise NoReward("the tests left no JUnit report: did pytest run?")
    for path in reports:
        for case in _root(path).iter("testcase"):
            name = f"{case.get('classname', '')}::{case.get('name', '')}"
            passed = not any(child.tag in ("failure", "error", "skipped") for child in case)
            verdicts[name] = verdicts.get(name, True) and passed
    total = expected or len(verdicts)
    if not total:
        raise NoReward("no test ran")
    return min(1.0, sum(verdicts.values()) / total)


def _root(path: Path) -> ElementTree.Element:
    try:
        return ElementTree.fromstring(_read_regular(path, MOST_REPORT_BYTES) or "")
    except ElementTree.ParseError as error:
        raise NoReward(f"{path.name} is not XML: {error}") from error


def _all_passed(task: Task, folder: Path) -> float:
    return float(pass_rate(folder, task.expected_tests) == 1.0)


BUILT_IN: dict[str, Reward] = {
    "file": lambda task, folder: read_reward(folder),
    "junit": lambda task, folder: pass_rate(folder, task.expected_tests),
    "junit-all": _all_passed,
}


def _json_rewards(text: str) -> dict[str, float]:
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
        numbers[key] = finite(value)
    return numbers


def finite(value: float) -> float:
    try:
        number = float(value)
    except OverflowError as error:
        raise NoReward("the reward is too large") from error
    if not math.isfinite(number):
        raise NoReward(f"the reward is {number}")
    return number


def _read_regular(path: Path, most: int = MOST_REWARD_BYTES) -> str | None:
    """The text of a small regular file; None when there is none. Raises NoReward for anything else."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise NoReward(f"{path.name} cannot be read: {error.strerror}") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > most:
            raise NoReward(f"{path.name} is not a small regular file")
        return os.read(fd, most).decode()
    except UnicodeDecodeError as error:
        raise NoReward(f"{path.name} is not text") from error
    finally:
        os.close(fd)
