"""Reads task folders in the Harbor format (Terminal-Bench 2): instruction.md, task.toml, environment/, tests/test.sh.

Owns what of such a folder becomes a `Task`. Invariant: what gyre's sandboxes do not cover is refused here,
with the file and the key, before anything is submitted.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from msgspec import structs

from gyre.errors import UserError
from gyre.executions.dockerfile import Environment
from gyre.executions.formats.harbor_environment import agents_uncovered, built_from, settings
from gyre.executions.formats.harbor_steps import read_steps
from gyre.executions.formats.harbor_toml import (
    COMPOSE_FILES,
    TaskToml,
    named_user,
    phases_uncovered,
    read_artifacts,
    read_instruction,
    read_toml,
    refuse_outside,
    refuse_present,
    refuse_times,
    resolve_env,
)
from gyre.executions.formats.harbor_verifier import Source, is_separate, own_verifier, verifier_uncovered
from gyre.executions.tasks import Task, environment_digest


def recognises(folder: Path) -> bool:
    return (folder / "task.toml").is_file() or (folder / "instruction.md").is_file()


def load(folder: Path, env: Mapping[str, str]) -> Task:
    """Read one task folder. Raises UserError naming the file and what to do."""
    toml_path = folder / "task.toml"
    toml = read_toml(toml_path) if toml_path.is_file() else TaskToml()
    separate, verifier = is_separate(toml.verifier), Source(verifier=toml.verifier, tests="tests")
    brought = separate and verifier.has_image(folder)
    wanted = ["instruction.md", "task.toml", "tests/test.sh"][: 2 if brought else 3]
    for needed in ("task.toml",) if toml.steps else wanted:
        if not (folder / needed).is_file():
            why = "no file" if os.path.lexists(folder / needed) else "missing"
            raise UserError(f"{folder / needed}: {why}; a task needs instruction.md, task.toml and tests/test.sh")
    for name in ("environment", "tests", "solution"):
        refuse_outside(folder / name, folder)
    _refuse_uncovered(toml, toml_path, folder, verifier)
    decided = settings(toml.environment, _read_environment(folder, toml), env, toml_path, "environment")
    task = Task(
        name=folder.name,
        folder=folder,
        instruction="" if toml.steps else read_instruction(folder / "instruction.md"),
        **decided,
        docker_image=toml.environment.docker_image or folder.name,
        agent_user=named_user(toml.agent.user),
        verifier_user=named_user(toml.verifier.user),
        agent_timeout=toml.agent.timeout_sec,
        verifier_timeout=toml.verifier.timeout_sec,
        verifier_env=resolve_env(toml.verifier.env, env, toml_path, "verifier.env"),
        solution_env=resolve_env(toml.solution.env, env, toml_path, "solution.env"),
        digest=environment_digest(folder.name, decided["workdir"], folder / "environment"),
        healthcheck=toml.environment.healthcheck,
        separate=separate,
        artifacts=read_artifacts(toml.artifacts, toml_path),
        step_reward=toml.multi_step_reward_strategy or "mean",
    )
    if toml.steps:
        steps = read_steps(task, toml, verifier, env)
        return structs.replace(task, steps=steps, instruction=steps[0].instruction)
    return structs.replace(task, own_verifier=own_verifier(task, toml, (verifier,), env)) if separate else task


def _refuse_uncovered(toml: TaskToml, path: Path, folder: Path, verifier: Source) -> None:
    environment = toml.environment
    uncovered = {
        **phases_uncovered(toml.agent, toml.verifier, folder),
        **agents_uncovered(environment, "environment"),
        **verifier_uncovered(verifier, is_separate(toml.verifier), folder),
    }
    refuse_present(uncovered, path)
    if environment.healthcheck is not None and (problem := environment.healthcheck.problem):
        raise UserError(f"{path}: environment.healthcheck: {problem}")
    refuse_times(toml.agent, toml.verifier, path)


def _read_environment(folder: Path, toml: TaskToml) -> Environment:
    place = folder / "environment"
    for name in COMPOSE_FILES:
        if (place / name).exists():
            raise UserError(f"{place / name}: compose files are not covered; leave this task out")
    found = built_from(place, toml.environment.docker_image, folder / "task.toml", "environment")
    return Environment() if found is None else found
