"""Reads task folders in the Harbor format (Terminal-Bench 2): instruction.md, task.toml, environment/, tests/test.sh.

Owns the reader of task.toml (schema 1.0 to 1.4 and its older keys). Invariant: what gyre's sandboxes do not cover is
refused here, with the file and the key, before anything is submitted.
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
from gyre.executions.dockerfile import Environment, read_or_refuse
from gyre.executions.healthcheck import Healthcheck
from gyre.executions.limits import MIB
from gyre.executions.tasks import DEFAULT_WORKDIR, Task, environment_digest

SCHEMAS = ("1.0", "1.1", "1.2", "1.3", "1.4")
COMPOSE_FILES = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
CANARY = re.compile(r"canary", re.IGNORECASE)
COMMENT = re.compile(r"^\s*(#|//|<!--)")
VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")


class _Agent(Struct):
    timeout_sec: float = 0.0
    user: str | int | None = None
    network_mode: str = ""


class _Verifier(Struct):
    timeout_sec: float = 600.0
    user: str | int | None = None
    env: dict[str, str] = field(default_factory=dict)
    environment_mode: Literal["shared", "separate"] = "shared"
    environment: dict[str, Any] | None = None
    collect: list[Any] = field(default_factory=list)
    network_mode: str = ""


class _Artifact(Struct):
    source: str
    service: str = "main"


class _Solution(Struct):
    env: dict[str, str] = field(default_factory=dict)


class _Environment(Struct):
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


class _TaskToml(Struct):
    """The keys that gyre acts on; others (metadata, authors, ...) describe the task and are left alone."""

    schema_version: str = ""
    version: str = ""
    agent: _Agent = field(default_factory=_Agent)
    verifier: _Verifier = field(default_factory=_Verifier)
    environment: _Environment = field(default_factory=_Environment)
    solution: _Solution = field(default_factory=_Solution)
    steps: list[Any] = field(default_factory=list)
    artifacts: list[str | _Artifact] = field(default_factory=list)


def recognises(folder: Path) -> bool:
    return (folder / "task.toml").is_file() or (folder / "instruction.md").is_file()


def load(folder: Path, env: Mapping[str, str]) -> Task:
    """Read one task folder. Raises UserError naming the file and what to do."""
    for needed in ("instruction.md", "task.toml", "tests/test.sh"):
        if not (folder / needed).is_file():
            raise UserError(f"{folder / needed}: missing; a task needs instruction.md, task.toml and tests/test.sh")
    toml_path = folder / "task.toml"
    toml = _read_toml(toml_path)
    _refuse_uncovered(toml, toml_path, folder)
    environment = _read_environment(folder, toml)
    given = toml.environment.workdir or environment.workdir
    workdir = given or DEFAULT_WORKDIR
    if not workdir.startswith("/") or ".." in workdir.split("/"):
        raise UserError(f"{toml_path}: environment.workdir {workdir!r} must be an absolute path without ..")
    return Task(
        name=folder.name,
        folder=folder,
        instruction=_read_instruction(folder / "instruction.md"),
        environment=environment,
        workdir=workdir,
        workdir_given=bool(given),
        docker_image=toml.environment.docker_image or folder.name,
        agent_timeout=toml.agent.timeout_sec,
        verifier_timeout=toml.verifier.timeout_sec,
        env=resolve_env(toml.environment.env, env, toml_path, "environment.env"),
        verifier_env=resolve_env(toml.verifier.env, env, toml_path, "verifier.env"),
        solution_env=resolve_env(toml.solution.env, env, toml_path, "solution.env"),
        memory=_size(toml.environment.memory_mb, toml.environment.memory, toml_path, "memory"),
        storage=_size(toml.environment.storage_mb, toml.environment.storage, toml_path, "storage"),
        digest=environment_digest(folder.name, workdir, folder / "environment"),
        healthcheck=toml.environment.healthcheck,
        separate=toml.verifier.environment_mode == "separate",
        artifacts=_artifacts(toml, toml_path),
    )


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


def _read_toml(path: Path) -> _TaskToml:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path}: not readable as TOML: {error}") from error
    if not isinstance(data.get("version", ""), str):
        data["version"] = str(data["version"])
    try:
        toml = msgspec.convert(data, _TaskToml, strict=False)
    except msgspec.ValidationError as error:
        raise UserError(f"{path}: {error}") from error
    schema = toml.schema_version or toml.version or SCHEMAS[0]
    if schema not in SCHEMAS:
        raise UserError(f"{path}: schema_version {schema!r} is not one of {', '.join(SCHEMAS)}")
    return toml


def _refuse_uncovered(toml: _TaskToml, path: Path, folder: Path) -> None:
    root_users = (None, "", "root", 0, "0")
    open_to_some = any("allowlist" in part.network_mode for part in (toml.agent, toml.verifier, toml.environment))
    own_image = [name for name in ("Dockerfile", "docker-compose.yaml") if (folder / "tests" / name).is_file()]
    uncovered = {
        "[[steps]] (tasks of several steps)": bool(toml.steps),
        "trajectory.json (a conversation to begin with)": (folder / "trajectory.json").is_file(),
        "environment.mcp_servers": bool(toml.environment.mcp_servers),
        "environment.skills_dir": bool(toml.environment.skills_dir),
        "environment.gpus": toml.environment.gpus > 0,
        "environment.tpu": toml.environment.tpu is not None,
        'environment.os other than "linux"': toml.environment.os.lower() != "linux",
        'network_mode = "allowlist" (a sandbox reaches the model and nothing else)': open_to_some,
        "[verifier.environment] (an image of the verifier's own)": toml.verifier.environment is not None,
        "tests/Dockerfile (an image of the verifier's own)": toml.verifier.environment_mode == "separate" and own_image,
        "[[verifier.collect]] (all processes are ended before)": bool(toml.verifier.collect),
        "agent.user other than root": toml.agent.user not in root_users,
        "verifier.user other than root": toml.verifier.user not in root_users,
    }
    for what, present in uncovered.items():
        if present:
            raise UserError(f"{path}: {what} is not covered by gyre's sandboxes; leave this task out")
    if toml.environment.healthcheck is not None and (problem := toml.environment.healthcheck.problem):
        raise UserError(f"{path}: environment.healthcheck: {problem}")
    for key, seconds in (("agent", toml.agent.timeout_sec), ("verifier", toml.verifier.timeout_sec)):
        if not 0 <= seconds < float("inf"):
            raise UserError(f"{path}: {key}.timeout_sec must be a number of seconds, not {seconds}")


def _artifacts(toml: _TaskToml, path: Path) -> tuple[str, ...]:
    found = [_Artifact(item) if isinstance(item, str) else item for item in toml.artifacts]
    for artifact in found:
        if artifact.service != "main" or not artifact.source or ".." in artifact.source.split("/"):
            raise UserError(f"{path}: artifacts: {artifact.source!r} must be a path of the main service, without ..")
    return tuple(artifact.source for artifact in found)


def _read_environment(folder: Path, toml: _TaskToml) -> Environment:
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


def _read_instruction(path: Path) -> str:
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


def _size(megabytes: int, text: str, path: Path, key: str) -> int:
    """Bytes from `memory_mb = 2048`, or from the older `memory = "2G"`; 0 when neither is set."""
    if megabytes or not text:
        return megabytes * MIB
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?\s*", text, re.IGNORECASE)
    if match is None:
        raise UserError(f'{path}: environment.{key} {text!r} is not a size such as "2G" or "512M"')
    return int(float(match.group(1)) * 1024 ** " KMGT".index(match.group(2).upper() or " "))
