"""A task: an instruction, an environment and a grader; read from folders of several formats.

Owns the `Task` struct and the choice of the format: Harbor, the original terminal-bench, NL2RepoBench, and those that
other packages offer under the entry-point group `gyre.tasks` (an object with `recognises(folder) -> bool` and
`load(folder, env) -> Task`). Invariant: a `Task` that loads can be run and graded by the sandboxes that gyre has.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol, cast

from msgspec import Struct, field, structs

from gyre.errors import UserError
from gyre.executions.dockerfile import Environment
from gyre.executions.healthcheck import Healthcheck
from gyre.executions.images.store import Image, Images
from gyre.executions.steps import Step, Strategy
from gyre.executions.texts import refuse_texts

GROUP = "gyre.tasks"
BUILT_IN = {
    "harbor": "gyre.executions.formats.harbor",
    "terminal-bench": "gyre.executions.formats.terminal_bench",
    "nl2repo": "gyre.executions.formats.nl2repo",
}
DEFAULT_WORKDIR = "/app"
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
    agent_user: str = ""
    """Runs the harness, as a Dockerfile's USER names it; "": the image's own, else root."""
    verifier_user: str = ""
    """Runs the tests, likewise."""
    docker_image: str = ""
    """Reference of a prebuilt image that may be the whole environment."""
    image: Image | None = None
    """What the sandbox lies on; None: the host's own system."""
    workdir_given: bool = True
    """The task says its work directory; otherwise an image's own comes first."""
    agent_timeout: float = 0.0
    verifier_timeout: float = 600.0
    env: dict[str, str] = field(default_factory=dict)
    verifier_env: dict[str, str] = field(default_factory=dict)
    solution_env: dict[str, str] = field(default_factory=dict)
    memory: int = 0
    storage: int = 0
    digest: str = ""
    """Names what the environment is built from: the same digest is the same seed layer."""

    test_folders: tuple[str, ...] = ("tests",)
    """What the grader sees at /tests, of those that exist; later ones lie over earlier ones. Relative to `folder`, as
    the next ones."""
    test_file: str = "tests/test.sh"
    """Grades the workspace."""
    test_text: str = ""
    """A bash script that does it in the place of `test_file`."""
    solution_folder: str = "solution"
    solve_file: str = "solution/solve.sh"
    reward: str = "file"
    """How the grader's files become a number: see `gyre.executions.rewards`."""
    healthcheck: Healthcheck | None = None
    separate: bool = False
    """Graded in a fresh environment that has only the artifacts of the execution."""
    artifacts: tuple[str, ...] = ()
    """Paths inside, relative ones in the work directory."""
    expected_tests: int = 0
    """How many passed tests are the full reward; 0: all that ran."""
    steps: tuple[Step, ...] = ()
    """In order; of a task that has some, `instruction` is the first one's and what a step names is the step's."""
    step_reward: Strategy = "mean"

    own_verifier: Task | None = None
    """The environment of a separate verifier where it is another than the execution's: only that part of it counts."""

    @property
    def grader(self) -> Task:
        """The task in the environment that it is graded in."""
        return self.own_verifier or self

    @property
    def on_image(self) -> bool:
        """Its lowest layer is a whole system of its own; otherwise the host's is bound in."""
        return self.image is not None

    @property
    def images(self) -> tuple[Image | None, ...]:
        """What the execution and, where they are others, its gradings lie on; None: the host's own system."""
        graders = (self.own_verifier, *(step.own_verifier for step in self.steps))
        return tuple(dict.fromkeys((self.image, *(grader.image for grader in graders if grader is not None))))

    @property
    def before(self) -> str:
        """Bash that must succeed in the environment before anything else runs there."""
        return self.healthcheck.script() if self.healthcheck is not None else ""

    @property
    def tests(self) -> Path:
        return self.folder / self.test_folders[-1]

    @property
    def test_layers(self) -> tuple[Path, ...]:
        """The folders of tests that exist, the lowest first."""
        return tuple(path for name in self.test_folders if (path := self.folder / name).is_dir())

    @property
    def solution(self) -> Path:
        return self.folder / self.solve_file


class Format(Protocol):
    """Reads task folders of one kind."""

    def recognises(self, folder: Path) -> bool:
        """Is this a task of this kind? Looks at the names of files only."""

    def load(self, folder: Path, env: Mapping[str, str]) -> Task:
        """The task; `env` is what variables in it refer to. Raises UserError naming the file and what to do."""


def formats() -> Iterator[tuple[str, Format]]:
    """With their names, the built-in ones first."""
    for name, module in BUILT_IN.items():
        yield name, cast(Format, importlib.import_module(module))
    for entry in entry_points(group=GROUP):
        loaded = entry.load()
        yield entry.name, loaded() if isinstance(loaded, type) else loaded


NO_IMAGES = Images()


def load_tasks(
    path: Path, host_env: Mapping[str, str] | None = None, reward: str = "", images: Images = NO_IMAGES
) -> list[Task]:
    """All tasks below `path` (a folder of task folders, or one task folder), sorted by name.

    `reward`, when given, is the rule of every task in the place of its own. `host_env` is what `${VAR}` in a task's env
    refers to (the process's own environment when None).
    Raises UserError for a path without tasks and for any task that cannot be read or is not covered.
    """
    tasks = [load_task(folder, host_env, images) for folder in task_folders(path)]
    return [structs.replace(task, reward=reward) for task in tasks] if reward else tasks


def task_folders(path: Path) -> list[Path]:
    """`path` itself, or the folders in it, sorted by name. Raises UserError when there are none."""
    try:
        if not path.is_dir():
            raise UserError(f"{path}: no such folder of tasks")
        if format_of(path) is not None:
            return [path]
        folders = sorted(f for f in path.iterdir() if f.is_dir() and not f.name.startswith((".", "__")))
    except OSError as error:
        raise UserError(f"{path}: not readable: {error}") from error
    if not folders:
        raise UserError(
            f"{path}: no task folders in it; each task is a folder (Harbor's: instruction.md and task.toml)"
        )
    return folders


def load_task(folder: Path, host_env: Mapping[str, str] | None = None, images: Images = NO_IMAGES) -> Task:
    """Read one task folder and find its image. Raises UserError naming the file and what to do."""
    folder = folder.resolve()
    if not NAME.fullmatch(folder.name):
        raise UserError(f"{folder}: a task's folder is named by letters, digits and . _ - only; rename it")
    try:
        found = format_of(folder)
        if found is None:
            raise UserError(f"{folder}: {_no_task(folder)}")
        task = found.load(folder, os.environ if host_env is None else host_env)
        refuse_texts(task)
        task = on_image(task, images)
    except OSError as error:
        raise UserError(f"{folder}: not readable: {error}") from error
    refuse_texts(task)  # an image says some, too
    return task


def _no_task(folder: Path) -> str:
    """Why nothing recognises it."""
    if any(format_of(inside) for inside in folder.iterdir() if inside.is_dir()):
        return "a folder of tasks, and no task: give it as the path"
    return f"not a task of a known format ({', '.join(BUILT_IN)}): instruction.md is missing"


def on_image(task: Task, images: Images) -> Task:
    """`task` on its image: a prebuilt one of its own, else the base that its Dockerfile names; what the image says of
    its variables and its work directory holds where the task says nothing.

    Raises UserError when the environment can be had neither way. Without a folder of images, the host's system stands
    in for a base.
    """
    built, environment = images.find(task.docker_image), task.environment
    image = built or images.find(environment.image)
    if built is not None:
        environment = Environment(image=task.docker_image)
    elif environment.refused:
        raise UserError(environment.refused)
    elif images.folder is not None and environment.image and image is None:
        raise UserError(
            f"{task.folder}: image {environment.image!r} is not in {images.folder} (as a folder, an OCI archive .tar,"
            " a .sif or a .sqsh, with _ for / and :)"
        )
    env, workdir, user = {**environment.env, **task.env}, task.workdir, environment.user
    if image is not None:
        config = image.config()
        env = {**config.env, **env}
        if not task.workdir_given and config.workdir not in ("", "/"):
            workdir = config.workdir
        user = user or config.user
    digest = f"{task.digest}-prebuilt" if built is not None else task.digest
    return structs.replace(
        task,
        image=image,
        environment=environment,
        env=env,
        workdir=workdir,
        digest=digest,
        agent_user=task.agent_user or user,
        verifier_user=task.verifier_user or user,
        own_verifier=verifier_on_image(task.own_verifier, images),
        steps=tuple(
            structs.replace(step, own_verifier=verifier_on_image(step.own_verifier, images)) for step in task.steps
        ),
    )


def verifier_on_image(verifier: Task | None, images: Images) -> Task | None:
    return on_image(verifier, images) if verifier is not None else None


def format_of(folder: Path) -> Format | None:
    """The one that recognises `folder`. Raises UserError where several do."""
    found = {name: each for name, each in formats() if each.recognises(folder)}
    if len(found) > 1:
        raise UserError(f"{folder}: a task of several formats ({', '.join(found)}); leave the files of one")
    return next(iter(found.values()), None)


def environment_digest(name: str, workdir: str, environment: Path) -> str:
    """Name, workdir, and the path, size and time of every file that the environment is made of."""
    hasher = hashlib.sha256(f"{name}\n{workdir}\n{environment}\n".encode())
    for file in sorted(environment.rglob("*")):
        status = file.lstat()
        hasher.update(f"{file.relative_to(environment)} {status.st_size} {status.st_mtime_ns}\n".encode())
    return hasher.hexdigest()[:16]
