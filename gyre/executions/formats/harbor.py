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
from gyre.executions.formats.harbor_toml import (
    Environment as EnvironmentToml,
    TaskToml,
    read_artifacts,
    read_toml,
    resolve_env,
)
from gyre.executions.limits import MIB
from gyre.executions.tasks import DEFAULT_WORKDIR, Task, environment_digest

COMPOSE_FILES = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
CANARY = re.compile(r"canary", re.IGNORECASE)
COMMENT = re.compile(r"^\s*(#|//|<!--)")


def recognises(folder: Path) -> bool:
    return (folder / "task.toml").is_file() or (folder / "instruction.md").is_file()


def load(folder: Path, env: Mapping[str, str]) -> Task:
    """Read one task folder. Raises UserError naming the file and what to do."""
    toml_path = folder / "task.toml"
    toml = read_toml(toml_path) if toml_path.is_file() else TaskToml()
    tests_in_image = toml.verifier.environment is not None and toml.verifier.environment.docker_image
    for needed in ("instruction.md", "task.toml", *(() if tests_in_image else ("tests/test.sh",))):
        if not (folder / needed).is_file():
            raise UserError(f"{folder / needed}: missing; a task needs instruction.md, task.toml and tests/test.sh")
    _refuse_uncovered(toml, toml_path, folder)
    environment = _read_environment(folder, toml)
    given = toml.environment.workdir or environment.workdir
    workdir = given or DEFAULT_WORKDIR
    if not workdir.startswith("/") or ".." in workdir.split("/"):
        raise UserError(f"{toml_path}: environment.workdir {workdir!r} must be an absolute path without ..")
    task = Task(
        name=folder.name,
        folder=folder,
        instruction=_read_instruction(folder / "instruction.md"),
        environment=environment,
        workdir=workdir,
        workdir_given=bool(given),
        docker_image=toml.environment.docker_image or folder.name,
        agent_user="" if toml.agent.user is None else str(toml.agent.user),
        verifier_user="" if toml.verifier.user is None else str(toml.verifier.user),
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
        artifacts=read_artifacts(toml, toml_path),
    )
    return structs.replace(task, own_verifier=own_verifier(task, toml, env))


def _refuse_uncovered(toml: TaskToml, path: Path, folder: Path) -> None:
    own = toml.verifier.environment
    modes = (part.network_mode for part in (toml.agent, toml.verifier))
    environments = (toml.environment, own) if own is not None else (toml.environment,)
    open_to_some = any("allowlist" in mode for mode in (*modes, *(part.network_mode for part in environments)))
    uncovered = {
        "[[steps]] (tasks of several steps)": bool(toml.steps),
        "trajectory.json (a conversation to begin with)": (folder / "trajectory.json").is_file(),
        **_uncovered(toml.environment, "environment"),
        **(_uncovered(own, "verifier.environment") if own is not None else {}),
        "verifier.environment.healthcheck": own is not None and own.healthcheck is not None,
        'network_mode = "allowlist" (a sandbox reaches the model and nothing else)': open_to_some,
        '[verifier.environment] with environment_mode = "shared"': toml.verifier.environment is not None
        and not is_separate(toml),
        "tests/docker-compose.yaml (a verifier of several services)": is_separate(toml)
        and any((folder / "tests" / name).exists() for name in COMPOSE_FILES),
        "[[verifier.collect]] (all processes are ended before)": bool(toml.verifier.collect),
    }
    for what, present in uncovered.items():
        if present:
            raise UserError(f"{path}: {what} is not covered by gyre's sandboxes; leave this task out")
    if toml.environment.healthcheck is not None and (problem := toml.environment.healthcheck.problem):
        raise UserError(f"{path}: environment.healthcheck: {problem}")
    for key, seconds in (("agent", toml.agent.timeout_sec), ("verifier", toml.verifier.timeout_sec)):
        if not 0 <= seconds < float("inf"):
            raise UserError(f"{path}: {key}.timeout_sec must be a number of seconds, not {seconds}")


def _uncovered(environment: EnvironmentToml, key: str) -> dict[str, bool]:
    return {
        f"{key}.mcp_servers": bool(environment.mcp_servers),
        f"{key}.skills_dir": bool(environment.skills_dir),
        f"{key}.gpus": environment.gpus > 0,
        f"{key}.tpu": environment.tpu is not None,
        f'{key}.os other than "linux"': environment.os.lower() != "linux",
    }


def is_separate(toml: TaskToml) -> bool:
    """Is it graded in a fresh environment? It is, unless told otherwise, where that is the verifier's own."""
    return toml.verifier.environment_mode == "separate" or (
        not toml.verifier.environment_mode and toml.verifier.environment is not None
    )


def own_verifier(task: Task, toml: TaskToml, env: Mapping[str, str]) -> Task | None:
    """`task` in the environment of its verifier, where that is not its own: `verifier.environment`, from its
    `docker_image` or from tests/Dockerfile; without that table, tests/Dockerfile in the place of environment/'s.

    Raises UserError.
    """
    own, dockerfile, path = toml.verifier.environment, task.tests / "Dockerfile", task.folder / "task.toml"
    if not task.separate or (own is None and (toml.environment.docker_image or not dockerfile.is_file())):
        return None
    settings = toml.environment if own is None else own
    if dockerfile.is_file():
        environment = read_or_refuse(dockerfile)
    elif settings.docker_image:
        refused = f"{path}: verifier.environment.docker_image {settings.docker_image!r} is not in sandbox.images"
        environment = Environment(image=settings.docker_image, refused=f"{refused}; put it there")
    else:
        raise UserError(
            f"{path}: verifier.environment names no docker_image, and there is no tests/Dockerfile; add one"
        )
    given = settings.workdir or environment.workdir
    workdir = given or DEFAULT_WORKDIR
    return structs.replace(
        task,
        name=f"{task.name}-verifier",
        environment=environment,
        workdir=workdir,
        workdir_given=bool(given),
        docker_image=settings.docker_image or f"{task.name}-verifier",
        env=resolve_env(settings.env, env, path, "verifier.environment.env"),
        memory=_size(settings.memory_mb, settings.memory, path, "memory"),
        storage=_size(settings.storage_mb, settings.storage, path, "storage"),
        digest=environment_digest(f"{task.name}-verifier", workdir, task.tests),
        healthcheck=None,
    )


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
