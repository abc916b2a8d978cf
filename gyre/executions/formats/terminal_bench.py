"""Reads task folders of the original terminal-bench: task.yaml, Dockerfile, run-tests.sh, tests/, solution.sh.

Its own runner types the tests into a terminal and parses what they print; here the verdict comes from pytest's JUnit
report, which a program that prints "999 passed" does not change. Invariant: what cannot be run or judged so is refused
with the file and the key.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from gyre.errors import UserError
from gyre.executions.dockerfile import Environment, read_or_refuse
from gyre.executions.tasks import DEFAULT_WORKDIR, Task, environment_digest

PARSERS = ("pytest",)
COMPOSE_FILES = ("docker-compose.yaml", "docker-compose.yml")


class _TaskYaml(Struct):
    """The keys that gyre acts on; others describe the task."""

    instruction: str
    parser_name: str = "pytest"
    max_agent_timeout_sec: float = 360.0
    max_test_timeout_sec: float = 60.0


def recognises(folder: Path) -> bool:
    return (folder / "task.yaml").is_file()


def load(folder: Path, env: Mapping[str, str]) -> Task:
    """Read one task folder; resolved is a reward of 1: every test passed. Raises UserError."""
    path = folder / "task.yaml"
    for needed in ("run-tests.sh", "tests"):
        if not (folder / needed).exists():
            raise UserError(f"{folder / needed}: missing; such a task needs task.yaml, run-tests.sh and tests/")
    try:
        found = msgspec.convert(read_yaml(path), _TaskYaml, strict=False)
    except msgspec.ValidationError as error:
        raise UserError(f"{path}: {error}") from error
    if found.parser_name not in PARSERS:
        raise UserError(f"{path}: parser_name {found.parser_name!r} is not covered (pytest is); leave this task out")
    for key in ("max_agent_timeout_sec", "max_test_timeout_sec"):
        if not 0 <= getattr(found, key) < math.inf:
            raise UserError(f"{path}: {key} must be a number of seconds, not {getattr(found, key)}")
    if not found.instruction.strip():
        raise UserError(f"{path}: the instruction is empty")
    _refuse_services(folder)
    dockerfile = folder / "Dockerfile"
    environment = read_or_refuse(dockerfile) if dockerfile.is_file() else Environment()
    workdir = environment.workdir or DEFAULT_WORKDIR
    return Task(
        name=folder.name,
        folder=folder,
        instruction=found.instruction.strip(),
        environment=environment,
        workdir=workdir,
        workdir_given=bool(environment.workdir),
        docker_image=folder.name,
        agent_timeout=found.max_agent_timeout_sec,
        verifier_timeout=found.max_test_timeout_sec,
        verifier_env={"TEST_DIR": "/tests"},
        digest=environment_digest(folder.name, workdir, folder),
        test_file="run-tests.sh",
        solve_file="solution.sh",
        reward="junit-all",
    )


def read_yaml(path: Path) -> Any:
    import yaml

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path}: not readable as YAML: {' '.join(str(error).split())}") from error


def _refuse_services(folder: Path) -> None:
    """Every such task has a compose file for its one container; more containers are not covered."""
    for name in COMPOSE_FILES:
        if (folder / name).is_file():
            whole = read_yaml(folder / name)
            services = whole.get("services") if isinstance(whole, dict) else None
            if not isinstance(services, dict):
                raise UserError(f"{folder / name}: no services; it must name the task's one")
            if len(services) > 1:
                raise UserError(f"{folder / name}: {len(services)} services, and one is covered; leave this task out")
