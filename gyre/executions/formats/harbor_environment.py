"""The `[environment]` tables of a Harbor task: its own, its verifier's and those of its steps' verifiers.

Owns what such a table says of a `Task`'s environment. Invariant: what gyre's sandboxes do not cover, or what is no size
or path, is refused with the file and the key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gyre.errors import UserError
from gyre.executions.dockerfile import Environment, read_or_refuse
from gyre.executions.formats.harbor_toml import CLOSED, Environment as EnvironmentToml, resolve_env
from gyre.executions.limits import MIB
from gyre.executions.tasks import DEFAULT_WORKDIR

SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?\s*", re.IGNORECASE)


def machine_uncovered(table: EnvironmentToml, key: str) -> dict[str, bool]:
    """What gyre's sandboxes do not cover of an environment's table -> is it there?"""
    return {
        f"{key}.gpus": table.gpus > 0,
        f"{key}.tpu": table.tpu is not None,
        f'{key}.os other than "linux"': table.os.lower() != "linux",
        f"{key}.{CLOSED}": table.network_mode == "allowlist",
    }


def agents_uncovered(table: EnvironmentToml, key: str) -> dict[str, bool]:
    """The same where an agent works in it; Harbor takes no notice of these keys where only a verifier does."""
    return {
        f"{key}.mcp_servers": bool(table.mcp_servers),
        f"{key}.skills_dir": bool(table.skills_dir),
        **machine_uncovered(table, key),
    }


def built_from(folder: Path, docker_image: str, path: Path, key: str) -> Environment | None:
    """What `folder`/Dockerfile says, else `docker_image`, which must be in sandbox.images; None without both."""
    dockerfile = folder / "Dockerfile"
    if dockerfile.is_file():
        return read_or_refuse(dockerfile)
    if not docker_image:
        return None
    return Environment(
        image=docker_image,
        refused=f"{path}: {key}.docker_image {docker_image!r} is not in sandbox.images; put it there, or add"
        f" {folder.relative_to(path.parent)}/Dockerfile of FROM, WORKDIR, COPY and ENV",
    )


def settings(
    table: EnvironmentToml, built: Environment, env: Mapping[str, str], path: Path, key: str
) -> dict[str, Any]:
    """The fields of `Task` that `table`, on what is `built`, decides. Raises UserError."""
    given = table.workdir or built.workdir
    workdir = given or DEFAULT_WORKDIR
    if not workdir.startswith("/") or ".." in workdir.split("/"):
        raise UserError(f"{path}: {key}.workdir {workdir!r} must be an absolute path without ..")
    return {
        "environment": built,
        "workdir": workdir,
        "workdir_given": bool(given),
        "env": resolve_env(table.env, env, path, f"{key}.env"),
        "memory": _size(table.memory_mb, table.memory, path, f"{key}.memory"),
        "storage": _size(table.storage_mb, table.storage, path, f"{key}.storage"),
    }


def _size(megabytes: int, text: str, path: Path, key: str) -> int:
    """Bytes from `memory_mb = 2048`, or from the older `memory = "2G"`; 0 when neither is set."""
    if megabytes < 0:
        raise UserError(f"{path}: {key}_mb must be a number of MiB, not {megabytes}")
    if not text:
        return megabytes * MIB
    match = SIZE.fullmatch(text)
    if match is None:
        raise UserError(f'{path}: {key} {text!r} is not a size such as "2G" or "512M"')
    size = int(float(match.group(1)) * 1024 ** " KMGT".index(match.group(2).upper() or " "))
    if megabytes and size != megabytes * MIB:
        raise UserError(f"{path}: {key} {text!r} is not {key}_mb = {megabytes}; leave one of them out")
    return size
