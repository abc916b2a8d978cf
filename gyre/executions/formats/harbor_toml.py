"""The keys of Harbor's task.toml (schema 1.0 to 1.4 and its older keys) that gyre acts on, for a task and for a step.

Owns their types, the reading of files, and what of a phase (agent, verifier) is refused. Invariant: what
does not fit is one line with the file and the key.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct, field

from gyre.errors import UserError
from gyre.executions.healthcheck import Healthcheck

SCHEMAS = ("1.0", "1.1", "1.2", "1.3", "1.4")
COMPOSE_FILES = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
CANARY = re.compile(r"canary", re.IGNORECASE)
COMMENT = re.compile(r"^\s*(#|//|<!--)")
CLOSED = 'network_mode = "allowlist" (a sandbox reaches the model and nothing else)'
NetworkMode = Literal["no-network", "public", "allowlist"]
VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")


class Agent(Struct):
    timeout_sec: float = 0.0
    user: str | int | None = None
    network_mode: NetworkMode | None = None


class Verifier(Struct):
    timeout_sec: float = 600.0
    user: str | int | None = None
    env: dict[str, str] = field(default_factory=dict)
    environment_mode: Literal["shared", "separate"] | None = None
    """None: of a step, the task's; of a task, shared, unless it has an environment of its own."""
    environment: Environment | None = None
    collect: list[Any] = field(default_factory=list)
    network_mode: NetworkMode | None = None


class Artifact(Struct):
    source: str
    service: str = "main"


class Solution(Struct):
    env: dict[str, str] = field(default_factory=dict)


class Environment(Struct):
    docker_image: str = ""
    memory_mb: int = 0
    storage_mb: int = 0
    memory: str = ""
    storage: str = ""
    gpus: int = 0
    env: dict[str, str] = field(default_factory=dict)
    workdir: str = ""
    healthcheck: Healthcheck | None = None
    mcp_servers: list[Any] = field(default_factory=list)
    os: str = "linux"
    tpu: Any = None
    skills_dir: str = ""
    network_mode: NetworkMode | None = None


class TaskToml(Struct):
    """The keys that gyre acts on; others (metadata, authors, ...) describe the task and are left alone."""

    schema_version: str = ""
    version: str = ""
    agent: Agent = field(default_factory=Agent)
    verifier: Verifier = field(default_factory=Verifier)
    environment: Environment = field(default_factory=Environment)
    solution: Solution = field(default_factory=Solution)
    steps: list[Any] = field(default_factory=list)
    """Read one by one, so that a fault names its step: see harbor_steps.py."""
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    artifacts: list[str | Artifact] = field(default_factory=list)


def resolve_env(env: Mapping[str, str], host_env: Mapping[str, str], source: Path, key: str) -> dict[str, str]:
    """`${VAR}` and `${VAR:-default}` replaced from `host_env`; a VAR without value and default is a
    UserError.
    """

    def value(match: re.Match[str]) -> str:
        name, default = match.group(1), match.group(2)
        if name in host_env:
            return host_env[name]
        if default is None:
            raise UserError(f"{source}: {key} needs the environment variable {name}; export it")
        return default

    return {name: VARIABLE.sub(value, text) for name, text in env.items()}


def read_toml(path: Path) -> TaskToml:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path}: not readable as TOML: {error}") from error
    if not isinstance(data.get("version", ""), str):
        data["version"] = str(data["version"])
    try:
        toml = msgspec.convert(data, TaskToml, strict=False)
    except msgspec.ValidationError as error:
        raise UserError(f"{path}: {error}") from error
    schema = toml.schema_version or toml.version or SCHEMAS[0]
    if schema not in SCHEMAS:
        raise UserError(f"{path}: schema_version {schema!r} is not one of {', '.join(SCHEMAS)}")
    return toml


def read_artifacts(artifacts: list[str | Artifact], path: Path, what: str = "") -> tuple[str, ...]:
    found = [Artifact(item) if isinstance(item, str) else item for item in artifacts]
    for artifact in found:
        if artifact.service != "main" or not artifact.source or ".." in artifact.source.split("/"):
            raise UserError(
                f"{path}: {what}artifacts: {artifact.source!r} must be a path of the main service, without .."
            )
    return tuple(artifact.source for artifact in found)


def read_instruction(path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not readable: {error}") from error
    start = 0
    while start < len(lines) and COMMENT.match(lines[start]) and CANARY.search(lines[start]):
        start += 1
    text = "\n".join(lines[start:]).strip()
    if not text:
        raise UserError(f"{path}: the instruction is empty")
    return text


def phases_uncovered(agent: Agent, verifier: Verifier, folder: Path) -> dict[str, bool]:
    """What gyre's sandboxes do not cover of a task, or of a step whose folder is `folder` -> is it there?"""
    return {
        "trajectory.json (a conversation to begin with)": (folder / "trajectory.json").is_file(),
        f"agent.{CLOSED}": agent.network_mode == "allowlist",
        f"verifier.{CLOSED}": verifier.network_mode == "allowlist",
        "[[verifier.collect]] (all processes are ended before)": bool(verifier.collect),
    }


def refuse_present(uncovered: Mapping[str, bool], path: Path) -> None:
    """Raises UserError for the first that is there."""
    for what, present in uncovered.items():
        if present:
            raise UserError(f"{path}: {what} is not covered by gyre's sandboxes; leave this task out")


def refuse_outside(place: Path, folder: Path, what: str = "") -> None:
    """Raises UserError where `place` is a link that leads out of the task's `folder`. (Path.resolve would raise for a
    link to itself.)
    """
    if not Path(os.path.realpath(place)).is_relative_to(os.path.realpath(folder)):
        raise UserError(f"{place}: {what}leads out of the task's folder")


def refuse_times(agent: Agent, verifier: Verifier, path: Path, what: str = "") -> None:
    """Raises UserError for what is no time."""
    for key, seconds in (("agent", agent.timeout_sec), ("verifier", verifier.timeout_sec)):
        if not 0 <= seconds < float("inf"):
            raise UserError(f"{path}: {what}{key}.timeout_sec must be a number of seconds, not {seconds}")


def named_user(user: str | int | None) -> str:
    """As a Dockerfile's USER names it; "": not said."""
    return "" if user is None else str(user)
