"""The environment of a Harbor task's verifier, where that is another than the agent's.

Owns when there is one and what it is. Invariant: only a separate verifier has one, and what of it gyre's sandboxes do
not cover is refused with its key.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msgspec import structs

from gyre.errors import UserError
from gyre.executions.dockerfile import Environment, read_or_refuse
from gyre.executions.formats.harbor_toml import (
    CLOSED,
    COMPOSE_FILES,
    Environment as EnvironmentToml,
    TaskToml,
    resolve_env,
)
from gyre.executions.tasks import DEFAULT_WORKDIR, Task, environment_digest


def is_separate(toml: TaskToml) -> bool:
    """Is it graded in a fresh environment? It is, unless told otherwise, where that is the verifier's own."""
    mode, own = toml.verifier.environment_mode, toml.verifier.environment
    return mode == "separate" or (mode is None and own is not None)


def environment_uncovered(environment: EnvironmentToml, key: str) -> dict[str, bool]:
    """What gyre's sandboxes do not cover of an environment's table -> is it there?"""
    return {
        f"{key}.mcp_servers": bool(environment.mcp_servers),
        f"{key}.skills_dir": bool(environment.skills_dir),
        f"{key}.gpus": environment.gpus > 0,
        f"{key}.tpu": environment.tpu is not None,
        f'{key}.os other than "linux"': environment.os.lower() != "linux",
        f"{key}.{CLOSED}": environment.network_mode == "allowlist",
    }


def verifier_uncovered(toml: TaskToml, folder: Path) -> dict[str, bool]:
    """The same of the verifier's own environment."""
    own, separate = toml.verifier.environment, is_separate(toml)
    image = own is not None or (separate and (folder / "tests/Dockerfile").is_file())
    return {
        '[verifier.environment] with environment_mode = "shared"': own is not None and not separate,
        "an image of the verifier's own for [[steps]]": bool(toml.steps) and image,
        "tests/docker-compose.yaml (a verifier of several services)": separate
        and any((folder / "tests" / name).exists() for name in COMPOSE_FILES),
        "verifier.environment.healthcheck": own is not None and own.healthcheck is not None,
        **(environment_uncovered(own, "verifier.environment") if own is not None else {}),
    }


def brings_its_tests(toml: TaskToml) -> bool:
    """May the verifier's image hold /tests in the place of the task's folder?"""
    return toml.verifier.environment is not None and bool(toml.verifier.environment.docker_image)


def own_verifier(task: Task, toml: TaskToml, env: Mapping[str, str]) -> Task | None:
    """`task` in the environment of its verifier, where that is not its own: `verifier.environment`, from its
    `docker_image` or from tests/Dockerfile; without that table, tests/Dockerfile in the place of environment/'s.

    Raises UserError.
    """
    own, dockerfile, path = toml.verifier.environment, task.folder / "tests/Dockerfile", task.folder / "task.toml"
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
    name = f"{task.name}-verifier"
    return structs.replace(
        task,
        name=name,
        environment=environment,
        workdir=workdir,
        workdir_given=bool(given),
        docker_image=settings.docker_image or name,
        env=resolve_env(settings.env, env, path, "verifier.environment.env"),
        digest=environment_digest(name, workdir, task.folder / "tests"),
        healthcheck=None,
    )
