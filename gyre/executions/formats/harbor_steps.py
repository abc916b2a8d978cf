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
from msgspec import Struct, field

from gyre.errors import UserError
from gyre.executions.formats.harbor_toml import (
    COMPOSE_FILES,
    Agent,
    Artifact,
    TaskToml,
    Verifier,
    named_user,
    phases_uncovered,
    read_artifacts,
    read_instruction,
    refuse_present,
    refuse_times,
    resolve_env,
)
from gyre.executions.healthcheck import Healthcheck
from gyre.executions.steps import REWARD, Step

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


def read_steps(folder: Path, toml: TaskToml, env: Mapping[str, str]) -> tuple[Step, ...]:
    """The steps in order; `env` is what `${VAR}` refers to. Raises UserError."""
    path = folder / "task.toml"
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
        steps.append(_step(folder, path, toml, step, env))
        if steps[-1].agent_user != steps[0].agent_user:
            raise UserError(
                f"{path}: step {step.name!r}: agent.user must be the same in all steps; leave this task out"
            )
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


def _step(folder: Path, path: Path, toml: TaskToml, step: StepToml, env: Mapping[str, str]) -> Step:
    what, place = f"step {step.name!r}: ", folder / "steps" / step.name
    relative = f"steps/{step.name}"
    mode = step.verifier.environment_mode or toml.verifier.environment_mode
    own_image = any((place / "tests" / name).is_file() for name in ("Dockerfile", *COMPOSE_FILES))
    uncovered = {
        **phases_uncovered(step.agent, step.verifier, place),
        "[verifier.environment] (an image of the verifier's own)": step.verifier.environment is not None,
        "tests/Dockerfile (an image of the verifier's own)": mode == "separate" and own_image,
    }
    refuse_present({what + key: present for key, present in uncovered.items()}, path)
    refuse_times(step.agent, step.verifier, path, what)
    if step.healthcheck is not None and (problem := step.healthcheck.problem):
        raise UserError(f"{path}: {what}healthcheck: {problem}")
    _contained(folder, place, path, what)
    own_tests = (place / "tests/test.sh").is_file()
    if not own_tests and not (folder / "tests/test.sh").is_file():
        raise UserError(
            f"{place / 'tests/test.sh'}: missing, and the task has no tests/test.sh; {what}nothing grades it"
        )
    solution = f"{relative}/solution" if (place / "solution").is_dir() else "solution"
    verifier_env = {**toml.verifier.env, **step.verifier.env}
    return Step(
        name=step.name,
        instruction=read_instruction(place / "instruction.md"),
        agent_user=named_user(step.agent.user) or named_user(toml.agent.user),
        verifier_user=named_user(step.verifier.user) or named_user(toml.verifier.user),
        agent_timeout=step.agent.timeout_sec or toml.agent.timeout_sec,
        verifier_timeout=step.verifier.timeout_sec,
        verifier_env=resolve_env(verifier_env, env, path, f"{what}verifier.env"),
        separate=mode == "separate",
        artifacts=(*read_artifacts(toml.artifacts, path), *read_artifacts(step.artifacts, path, what)),
        test_folders=("tests", f"{relative}/tests"),
        test_file=f"{relative}/tests/test.sh" if own_tests else "tests/test.sh",
        solution_folder=solution,
        solve_file=f"{solution}/solve.sh",
        healthcheck=step.healthcheck,
        files=place / "workdir" if (place / "workdir").is_dir() else None,
        min_reward=_min_reward(step.min_reward, path, what),
    )


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
        if not found.resolve().is_relative_to(folder.resolve()):
            raise UserError(f"{found}: {what}leads out of the task's folder")
