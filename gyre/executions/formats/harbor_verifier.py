"""Where a Harbor task, or a step of one, is graded: in its own environment, in a fresh one, or in the verifier's own.

Owns that choice, in Harbor's order: a step's own table and image, then the task's verifier's, then the task's.
Invariant: only a separate verifier has an environment, and what of it gyre's sandboxes do not cover is refused with
its key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct, structs

from gyre.executions.formats.harbor_environment import built_from, machine_uncovered, settings
from gyre.executions.formats.harbor_toml import COMPOSE_FILES, TaskToml, Verifier
from gyre.executions.tasks import Task, environment_digest


class Source(Struct, frozen=True, kw_only=True):
    """A `[verifier]` table and the folder of tests beside it, whose Dockerfile may be the verifier's image."""

    verifier: Verifier
    tests: str
    """Relative to the task's folder."""
    what: str = ""
    """Of a step: which one, for what is wrong."""
    name: str = ""
    """The step's."""

    @property
    def key(self) -> str:
        return f"{self.what}verifier.environment"

    @property
    def test_file(self) -> str:
        return f"{self.tests}/test.sh"

    def has_image(self, folder: Path) -> bool:
        """Does it say what the verifier lies on? Then that holds the tests, too."""
        table = self.verifier.environment
        return (table is not None and bool(table.docker_image)) or (folder / self.tests / "Dockerfile").is_file()


def is_separate(verifier: Verifier, inherited: bool = False) -> bool:
    """Is it graded in a fresh environment? By its mode; else it is where it has an environment of its own; else as the
    task (`inherited`).
    """
    if verifier.environment_mode is not None:
        return verifier.environment_mode == "separate"
    return verifier.environment is not None or inherited


def verifier_uncovered(source: Source, separate: bool, folder: Path) -> dict[str, bool]:
    """What gyre's sandboxes do not cover of a verifier's own environment -> is it there?"""
    table = source.verifier.environment
    return {
        f'[{source.key}] with environment_mode = "shared"': table is not None and not separate,
        f"{source.what}{source.tests}/docker-compose.yaml (a verifier of several services)": separate
        and any((folder / source.tests / name).exists() for name in COMPOSE_FILES),
        **(machine_uncovered(table, source.key) if table is not None else {}),
    }


def own_image(sources: Sequence[Source], folder: Path) -> Source | None:
    """The first of `sources` that says what a separate verifier lies on."""
    return next((source for source in sources if source.has_image(folder)), None)


def own_verifier(task: Task, toml: TaskToml, sources: Sequence[Source], env: Mapping[str, str]) -> Task | None:
    """`task` in the environment of its separate verifier, where that is not its own, fresh: the image of the first of
    `sources` that has one, with the settings of the first that has a table, each else the task's. Raises UserError.
    """
    folder, path = task.folder, task.folder / "task.toml"
    image = own_image(sources, folder)
    said = next((source for source in sources if source.verifier.environment is not None), None)
    if image is None and said is None:
        return None
    table, key = toml.environment, "environment"
    if said is not None and said.verifier.environment is not None:
        table, key = said.verifier.environment, said.key
    built, docker_image, context, name = task.environment, task.docker_image, "environment", task.name
    if image is not None:
        own, context = image.verifier.environment, image.tests
        docker_image = own.docker_image if own is not None else ""
        built = built_from(folder / context, docker_image, path, image.key) or built
        name = f"{task.name}-verifier"
        docker_image = docker_image or "-".join(filter(None, (task.name, image.name, "verifier")))
    found = structs.replace(
        task, **settings(table, built, env, path, key), name=name, docker_image=docker_image, healthcheck=None, steps=()
    )
    return structs.replace(found, digest=environment_digest(name, found.workdir, folder / context))
