"""Reads task folders in the Harbor format (Terminal-Bench 2): instruction.md, task.toml, environment/, tests/test.sh.

Owns what of such a folder becomes a `Task`. Invariant: what gyre's sandboxes do not cover is refused here,
with the file and the key, before anything is submitted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from msgspec import structs

from gyre.errors import UserError
from gyre.executions.dockerfile import Environment, read_or_refuse
from gyre.executions.formats.harbor_steps import read_steps
from gyre.executions.formats.harbor_toml import (
    COMPOSE_FILES,
    TaskToml,
    named_user,
    phases_uncovered,
    read_artifacts,
    read_instruction,
    read_toml,
    refuse_present,
    refuse_times,
    resolve_env,
)
from gyre.executions.formats.harbor_verifier import (
    brings_its_tests,
    environment_uncovered,
    is_separate,
    own_verifier,
    verifier_uncovered,
)
from gyre.executions.limits import MIB
from gyre.executions.tasks import DEFAULT_WORKDIR, Task, environment_digest


def recognises(folder: Path) -> bool:
    return (folder / "task.toml").is_file() or (folder / "instruction.md").is_file()


def load(folder: Path, env: Mapping[str, str]) -> Task:
    """Read one task folder. Raises UserError naming the file and what to do."""
    toml_path = folder / "task.toml"
    toml = read_toml(toml_path) if toml_path.is_file() else TaskToml()
    wanted = ["instruction.md", "task.toml", "tests/test.sh"][: 2 if brings_its_tests(toml) else 3]
    for needed in ("task.toml",) if toml.steps else wanted:
        if not (folder / needed).is_file():
            raise UserError(f"{folder / needed}: missing; a task needs instruction.md, task.toml and tests/test.sh")
    _refuse_uncovered(toml, toml_path, folder)
    steps = read_steps(folder, toml, env)
    environment = _read_environment(folder, toml)
    given = toml.environment.workdir or environment.workdir
    workdir = given or DEFAULT_WORKDIR
    if not workdir.startswith("/") or ".." in workdir.split("/"):
        raise UserError(f"{toml_path}: environment.workdir {workdir!r} must be an absolute path without ..")
    task = Task(
        name=folder.name,
        folder=folder,
        instruction=steps[0].instruction if steps else read_instruction(folder / "instruction.md"),
        environment=environment,
        workdir=workdir,
        workdir_given=bool(given),
        docker_image=toml.environment.docker_image or folder.name,
        agent_user=named_user(toml.agent.user),
        verifier_user=named_user(toml.verifier.user),
        agent_timeout=toml.agent.timeout_sec,
        verifier_timeout=toml.verifier.timeout_sec,
        env=resolve_env(toml.environment.env, env, toml_path, "environment.env"),
        verifier_env=resolve_env(toml.verifier.env, env, toml_path, "verifier.env"),
        solution_env=resolve_env(toml.solution.env, env, toml_path, "solution.env"),
        memory=_size(toml.environment.memory_mb, toml.environment.memory, toml_path, "memory"),
        storage=_size(toml.environment.storage_mb, toml.environment.storage, toml_path, "storage"),
        digest=environment_digest(folder.name, workdir, folder / "environment"),
        healthcheck=toml.environment.healthcheck,
        separate=is_separate(toml),
        artifacts=read_artifacts(toml.artifacts, toml_path),
        steps=steps,
        step_reward=toml.multi_step_reward_strategy or "mean",
    )
    return structs.replace(task, own_verifier=own_verifier(task, toml, env))


def _refuse_uncovered(toml: TaskToml, path: Path, folder: Path) -> None:
    environment = toml.environment
    uncovered = {
        **phases_uncovered(toml.agent, toml.verifier, folder),
        **environment_uncovered(environment, "environment"),
        **verifier_uncovered(toml, folder),
    }
    refuse_present(uncovered, path)
    if environment.healthcheck is not None and (problem := environment.healthcheck.problem):
        raise UserError(f"{path}: environment.healthcheck: {problem}")
    refuse_times(toml.agent, toml.verifier, path)


def _read_environment(folder: Path, toml: TaskToml) -> Environment:
    for name in COMPOSE_FILES:
        if (folder / "environment" / name).exists():
            raise UserError(f"{folder / 'environment' / name}: compose files are not covered; leave this task out")
    dockerfile = folder / "environment" / "Dockerfile"
    if dockerfile.is_file():
        return read_or_refuse(dockerfile)
    if toml.environment.docker_image:
        return Environment(
            image=toml.environment.docker_image,
            refused=f"{folder / 'task.toml'}: environment.docker_image {toml.environment.docker_image!r} is not in"
            " sandbox.images; put it there, or add an environment/Dockerfile of FROM, WORKDIR, COPY and ENV",
        )
    return Environment()


def _size(megabytes: int, text: str, path: Path, key: str) -> int:
    """Bytes from `memory_mb = 2048`, or from the older `memory = "2G"`; 0 when neither is set."""
    if megabytes or not text:
        return megabytes * MIB
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?\s*", text, re.IGNORECASE)
    if match is None:
        raise UserError(f'{path}: environment.{key} {text!r} is not a size such as "2G" or "512M"')
    return int(float(match.group(1)) * 1024 ** " KMGT".index(match.group(2).upper() or " "))
