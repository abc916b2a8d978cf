"""Reads task folders in the Harbor format into frozen structs.

Owns the `Task` struct and the reader of instruction.md and task.toml (schema 1.0 to 1.4 and its older keys).
Invariant: a `Task` that loads can be run and graded by the sandboxes that gyre has; what they do not cover is
refused here, with the file and the key, before anything is submitted.
"""

from __future__ import annotations

import hashlib
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field

from gyre.errors import UserError
from gyre.executions.dockerfile import Environment, read_dockerfile
from gyre.executions.limits import MIB

SCHEMAS = ("1.0", "1.1", "1.2", "1.3", "1.4")
COMPOSE_FILES = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
DEFAULT_WORKDIR = "/app"
CANARY = re.compile(r"canary", re.IGNORECASE)
COMMENT = re.compile(r"^\s*(#|//|<!--)")
VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Task(Struct, frozen=True, kw_only=True):
    """One instruction with its environment and its grader.

    Times are seconds, sizes bytes, 0 means "not set".
    """

    name: str
    """The folder's name: unique in a set of tasks."""
    folder: Path
    instruction: str
    environment: Environment
    workdir: str = DEFAULT_WORKDIR
    docker_image: str = ""
    agent_timeout: float = 0.0
    verifier_timeout: float = 600.0
    env: dict[str, str] = field(default_factory=dict)
    verifier_env: dict[str, str] = field(default_factory=dict)
    solution_env: dict[str, str] = field(default_factory=dict)
    memory: int = 0
    storage: int = 0
    digest: str = ""
    """Names what the environment is built from: the same digest is the same seed layer."""

    @property
    def tests(self) -> Path:
        return self.folder / "tests"

    @property
    def solution(self) -> Path:
        return self.folder / "solution"


class _Agent(Struct):
    timeout_sec: float = 0.0
    user: str | int | None = None


class _Verifier(Struct):
    timeout_sec: float = 600.0
    user: str | int | None = None
    env: dict[str, str] = field(default_factory=dict)
    environment_mode: str = "shared"


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
    healthcheck: Any = None
    mcp_servers: list[Any] = field(default_factory=list)


class _TaskToml(Struct):
    """The keys that gyre acts on; others (metadata, artifacts, ...) describe the task and are left alone."""

    schema_version: str = ""
    version: str = ""
    agent: _Agent = field(default_factory=_Agent)
    verifier: _Verifier = field(default_factory=_Verifier)
    environment: _Environment = field(default_factory=_Environment)
    solution: _Solution = field(default_factory=_Solution)
    steps: list[Any] = field(default_factory=list)


def load_tasks(path: Path, host_env: Mapping[str, str] | None = None) -> list[Task]:
    """All tasks below `path` (a folder of task folders, or one task folder), sorted by name.

    `host_env` is what `${VAR}` in a task's env refers to (the process's own environment when None).
    Raises UserError for a path without tasks and for any task that cannot be read or is not covered.
    """
    if not path.is_dir():
        raise UserError(f"{path}: no such folder of tasks")
    if (path / "task.toml").is_file() or (path / "instruction.md").is_file():
        return [load_task(path, host_env)]
    folders = sorted(f for f in path.iterdir() if f.is_dir() and not f.name.startswith((".", "__")))
    if not folders:
        raise UserError(f"{path}: no task folders in it; each task is a folder with instruction.md and task.toml")
    return [load_task(folder, host_env) for folder in folders]


def load_task(folder: Path, host_env: Mapping[str, str] | None = None) -> Task:
    """Read one task folder. Raises UserError naming the file and what to do."""
    env = os.environ if host_env is None else host_env
    folder = folder.resolve()
    if not NAME.fullmatch(folder.name):
        raise UserError(f"{folder}: a task's folder is named by letters, digits and . _ - only; rename it")
    for needed in ("instruction.md", "task.toml", "tests/test.sh"):
        if not (folder / needed).is_file():
            raise UserError(f"{folder / needed}: missing; a task needs instruction.md, task.toml and tests/test.sh")
    toml_path = folder / "task.toml"
    toml = _read_toml(toml_path)
    _refuse_uncovered(toml, toml_path)
    environment = _read_environment(folder, toml)
    workdir = toml.environment.workdir or environment.workdir or DEFAULT_WORKDIR
    if not workdir.startswith("/") or ".." in workdir.split("/"):
        raise UserError(f"{toml_path}: environment.workdir {workdir!r} must be an absolute path without ..")
    return Task(
        name=folder.name,
        folder=folder,
        instruction=_read_instruction(folder / "instruction.md"),
        environment=environment,
        workdir=workdir,
        docker_image=toml.environment.docker_image,
        agent_timeout=toml.agent.timeout_sec,
        verifier_timeout=toml.verifier.timeout_sec,
        env=resolve_env(toml.environment.env, env, toml_path, "environment.env"),
        verifier_env=resolve_env(toml.verifier.env, env, toml_path, "verifier.env"),
        solution_env=resolve_env(toml.solution.env, env, toml_path, "solution.env"),
        memory=_size(toml.environment.memory_mb, toml.environment.memory, toml_path, "memory"),
        storage=_size(toml.environment.storage_mb, toml.environment.storage, toml_path, "storage"),
        digest=_digest(folder.name, workdir, folder / "environment"),
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


def _refuse_uncovered(toml: _TaskToml, path: Path) -> None:
    root_users = (None, "", "root", 0, "0")
    uncovered = {
        "[[steps]] (tasks of several steps)": bool(toml.steps),
        "environment.mcp_servers": bool(toml.environment.mcp_servers),
        "environment.healthcheck": toml.environment.healthcheck is not None,
        "environment.gpus": toml.environment.gpus > 0,
        'verifier.environment_mode other than "shared"': toml.verifier.environment_mode != "shared",
        "agent.user other than root": toml.agent.user not in root_users,
        "verifier.user other than root": toml.verifier.user not in root_users,
    }
    for what, present in uncovered.items():
        if present:
            raise UserError(f"{path}: {what} is not covered by gyre's sandboxes; leave this task out")
    for key, seconds in (("agent", toml.agent.timeout_sec), ("verifier", toml.verifier.timeout_sec)):
        if not 0 <= seconds < float("inf"):
            raise UserError(f"{path}: {key}.timeout_sec must be a number of seconds, not {seconds}")


def _read_environment(folder: Path, toml: _TaskToml) -> Environment:
    for name in COMPOSE_FILES:
        if (folder / "environment" / name).exists():
            raise UserError(f"{folder / 'environment' / name}: compose files are not covered; leave this task out")
    dockerfile = folder / "environment" / "Dockerfile"
    if dockerfile.is_file():
        return read_dockerfile(dockerfile)
    if toml.environment.docker_image:
        raise UserError(
            f"{folder / 'task.toml'}: environment.docker_image {toml.environment.docker_image!r} needs an "
            "image, and the sandbox has none; add an environment/Dockerfile of FROM, WORKDIR and COPY"
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


def _digest(name: str, workdir: str, environment: Path) -> str:
    """Name, workdir, and the path, size and time of every file that the environment is made of."""
    hasher = hashlib.sha256(f"{name}\n{workdir}\n{environment}\n".encode())
    for file in sorted(environment.rglob("*")):
        status = file.lstat()
        hasher.update(f"{file.relative_to(environment)} {status.st_size} {status.st_mtime_ns}\n".encode())
    return hasher.hexdigest()[:16]
