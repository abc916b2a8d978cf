"""The keys of Harbor's task.toml (schema 1.0 to 1.4 and its older keys) that gyre acts on.

Owns their types and the reading of the file. Invariant: what does not fit is one line with the file and the key.
"""

from __future__ import annotations

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
VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")


class Agent(Struct):
    timeout_sec: float = 0.0
    user: str | int | None = None
    network_mode: str = ""


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
    network_mode: str = ""


class Verifier(Struct):
    timeout_sec: float = 600.0
    user: str | int | None = None
    env: dict[str, str] = field(default_factory=dict)
    environment_mode: Literal["shared", "separate", ""] = ""
    """"": separate, when it has an environment of its own."""
    environment: Environment | None = None
    collect: list[Any] = field(default_factory=list)
    network_mode: str = ""


class Artifact(Struct):
    source: str
    service: str = "main"


class Solution(Struct):
    env: dict[str, str] = field(default_factory=dict)


class TaskToml(Struct):
    """The keys that gyre acts on; others (metadata, authors, ...) describe the task and are left alone."""

    schema_version: str = ""
    version: str = ""
    agent: Agent = field(default_factory=Agent)
    verifier: Verifier = field(default_factory=Verifier)
    environment: Environment = field(default_factory=Environment)
    solution: Solution = field(default_factory=Solution)
    steps: list[Any] = field(default_factory=list)
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


def read_artifacts(toml: TaskToml, path: Path) -> tuple[str, ...]:
    found = [Artifact(item) if isinstance(item, str) else item for item in toml.artifacts]
    for artifact in found:
        if artifact.service != "main" or not artifact.source or ".." in artifact.source.split("/"):
            raise UserError(f"{path}: artifacts: {artifact.source!r} must be a path of the main service, without ..")
    return tuple(artifact.source for artifact in found)
