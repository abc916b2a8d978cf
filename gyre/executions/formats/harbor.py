"""Reads task folders in the Harbor format (Terminal-Bench 2): instruction.md, task.toml, environment/, tests/test.sh.

Owns what of such a folder becomes a `Task`. Invariant: what gyre's sandboxes do not cover is refused here,
with the file and the key, before anything is submitted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from gyre.errors import UserError
from gyre.executions.dockerfile import Environment, read_or_refuse
from gyre.executions.formats.harbor_toml import TaskToml, read_artifacts, read_toml, resolve_env
from gyre.executions.limits import MIB
from gyre.executions.tasks import DEFAULT_WORKDIR, Task, environment_digest

COMPOSE_FILES = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
CANARY = re.compile(r"canary", re.IGNORECASE)
COMMENT = re.compile(r"^\s*(#|//|<!--)")


def recognises(folder: Path) -> bool:
    return (folder / "task.toml").is_file() or (folder / "instruction.md").is_file()


def load(folder: Path, env: Mapping[str, str]) -> Task:
    """Read one task folder. Raises UserError naming the file and what to do."""
    for needed in ("instruction.md", "task.toml", "tests/test.sh"):
        if not (folder / needed).is_file():
            raise UserError(f"{folder / needed}: missing; a task needs instruction.md, task.toml and tests/test.sh")
    toml_path = folder / "task.toml"
    toml = read_toml(toml_path)
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
        separate=toml.verifier.environment_mode == "separate",
        artifacts=read_artifacts(toml, toml_path),
    )


def _refuse_uncovered(toml: TaskToml, path: Path, folder: Path) -> None:
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
    }
    for what, present in uncovered.items():
        if present:
            raise UserError(f"{path}: {what} is not covered by gyre's sandboxes; leave this task out")
    if toml.environment.healthcheck is not None and (problem := toml.environment.healthcheck.problem):
        raise UserError(f"{path}: environment.healthcheck: {problem}")
    for key, seconds in (("agent", toml.agent.timeout_sec), ("verifier", toml.verifier.timeout_sec)):
        if not 0 <= seconds < float("inf"):
            raise UserError(f"{path}: {key}.timeout_sec must be a number of seconds, not {seconds}")


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
