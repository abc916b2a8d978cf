"""Reads the steps of a task in the Harbor format: `[[steps]]` of task.toml and the folders `steps/<name>/`.

Owns the keys of a step and what they take from the task's own. Invariant: a fault is one line that names the file, the
step and the key; nothing of a step lies outside the task's folder.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field, structs

from gyre.errors import UserError
from gyre.executions.formats.harbor_toml import (
    Agent,
    Artifact,
    TaskToml,
    Verifier,
    named_user,
    phases_uncovered,
    read_artifacts,
    read_instruction,
    refuse_outside,
    refuse_present,
    refuse_times,
    resolve_env,
)
from gyre.executions.formats.harbor_verifier import Source, is_separate, own_image, own_verifier, verifier_uncovered
from gyre.executions.healthcheck import Healthcheck
from gyre.executions.steps import REWARD, Step
from gyre.executions.tasks import Task

MOST_NAME_BYTES = 255
NOT_IN_NAMES = re.compile(r'[<>:"/\\|?*\x00-\x1f\x7f]')
DEVICES = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|com[1-9¹²³]|lpt[1-9¹²³])", re.IGNORECASE)


class StepToml(Struct):
    """The keys of one `[[steps]]` entry."""

    name: str
    agent: Agent = field(default_factory=Agent)
    verifier: Verifier = field(default_factory=Verifier)
    min_reward: float | dict[str, float] | None = None
    healthcheck: Healthcheck | None = None
    artifacts: list[str | Artifact] = field(default_factory=list)


def read_steps(task: Task, toml: TaskToml, verifier: Source, env: Mapping[str, str]) -> tuple[Step, ...]:
    """The steps of `task` in order; `verifier` is the task's, and `env` what `${VAR}` refers to. Raises UserError."""
    path = task.folder / "task.toml"
    seen: set[str] = set()
    steps = []
    for number, data in enumerate(toml.steps, 1):
        step = _typed(data, path, number)
        key = unicodedata.normalize("NFC", step.name).casefold()
        if not _portable(step.name):
            raise UserError(f"{path}: step {step.name!r}: name must be that of one folder on any system")
        if key in seen:
            raise UserError(f"{path}: step {step.name!r}: name must be unique, in lower and upper case alike")
        seen.add(key)
        steps.append(_step(task, toml, step, verifier, env))
    return tuple(steps)


def _typed(data: Any, path: Path, number: int) -> StepToml:
    name = data.get("name") if isinstance(data, dict) else None
    try:
        return msgspec.convert(data, StepToml, strict=False)
    except msgspec.ValidationError as error:
        raise UserError(f"{path}: step {name!r} (number {number}): {error}") from error


def _portable(name: str) -> bool:
    reserved = DEVICES.fullmatch(name.partition(".")[0].rstrip(" ")) is not None
    ends = not name.strip() or name.endswith((".", " "))
    return not (reserved or ends or NOT_IN_NAMES.search(name) or len(name.encode()) > MOST_NAME_BYTES)


def _step(task: Task, toml: TaskToml, step: StepToml, verifier: Source, env: Mapping[str, str]) -> Step:
    folder, path, relative = task.folder, task.folder / "task.toml", f"steps/{step.name}"
    what, place = f"step {step.name!r}: ", folder / relative
    own = Source(verifier=step.verifier, tests=f"{relative}/tests", what=what, name=step.name)
    separate = is_separate(step.verifier, is_separate(toml.verifier))
    uncovered = {f"{what}{key}": there for key, there in phases_uncovered(step.agent, step.verifier, place).items()}
    refuse_present({**uncovered, **verifier_uncovered(own, separate, folder)}, path)
    refuse_times(step.agent, step.verifier, path, what)
    if step.healthcheck is not None and (problem := step.healthcheck.problem):
        raise UserError(f"{path}: {what}healthcheck: {problem}")
    _contained(folder, place, path, what)
    verifier_user = named_user(step.verifier.user) or named_user(toml.verifier.user)
    image = own_image((own, verifier), folder) if separate else None
    in_it = structs.replace(task, verifier_user=verifier_user)
    test_folders, test_file = _tests(folder, relative, what) if image is None else ((image.tests,), image.test_file)
    solution = f"{relative}/solution" if (place / "solution").is_dir() else "solution"
    verifier_env = {**toml.verifier.env, **step.verifier.env}
    return Step(
        name=step.name,
        instruction=read_instruction(place / "instruction.md"),
        agent_user=named_user(step.agent.user) or named_user(toml.agent.user),
        verifier_user=verifier_user,
        agent_timeout=step.agent.timeout_sec or toml.agent.timeout_sec,
        verifier_timeout=step.verifier.timeout_sec,
        verifier_env=resolve_env(verifier_env, env, path, f"{what}verifier.env"),
        separate=separate,
        own_verifier=own_verifier(in_it, toml, (own, verifier), env) if separate else None,
        artifacts=(*read_artifacts(toml.artifacts, path), *read_artifacts(step.artifacts, path, what)),
        test_folders=test_folders,
        test_file=test_file,
        solution_folder=solution,
        solve_file=f"{solution}/solve.sh",
        healthcheck=step.healthcheck,
        files=place / "workdir" if (place / "workdir").is_dir() else None,
        min_reward=_min_reward(step.min_reward, path, what),
    )


def _tests(folder: Path, relative: str, what: str) -> tuple[tuple[str, str], str]:
    """The folders of tests, the step's above the task's, and the script, where no image of a verifier holds them."""
    own, shared = f"{relative}/tests/test.sh", "tests/test.sh"
    found = next((name for name in (own, shared) if (folder / name).is_file()), None)
    if found is None:
        raise UserError(f"{folder / own}: missing, and the task has no {shared}; {what}nothing grades it")
    return ("tests", f"{relative}/tests"), found


def _min_reward(value: float | dict[str, float] | None, path: Path, what: str) -> dict[str, float]:
    """One number is that of the reward."""
    if value is None:
        return {}
    least = value if isinstance(value, dict) else {REWARD: value}
    if not all(map(math.isfinite, least.values())):
        raise UserError(f"{path}: {what}min_reward must be a number, or a table of numbers by the reward's name")
    return least


def _contained(folder: Path, place: Path, path: Path, what: str) -> None:
    """No link of a step's folder leads out of the task: it would show the agent what lies there."""
    if not place.is_dir():
        raise UserError(f"{path}: {what}there is no folder {place}")
    for found in (place, *place.rglob("*")):
        refuse_outside(found, folder, what)
