"""The run folder: where everything lies.

Owns every path below RUN and the search for runs. Invariant: no other module spells a path of the run folder.
"""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from gyre.errors import UserError
from gyre.ledger.files import fsync_folder, ledger_writes

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


def checked_name(name: str) -> str:
    """A writer's name is a file name without dots, so that `<writer>.<incarnation>` reads in one way only."""
    if not _NAME.fullmatch(name):
        raise UserError(f"{name!r} is not a name of a process: use letters, digits, - and _")
    return name


@dataclass(frozen=True)
class RunFolder:
    """The places of one run. Making this object touches nothing."""

    path: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path).absolute())

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.toml"

    @property
    def job(self) -> Path:
        return self.path / "job.toml"

    @property
    def launch(self) -> Path:
        return self.path / "launch"

    @property
    def journal(self) -> Path:
        return self.path / "journal"

    @property
    def alive(self) -> Path:
        return self.path / "alive"

    @property
    def trajectories(self) -> Path:
        return self.path / "trajectories"

    @property
    def microsteps(self) -> Path:
        return self.path / "microsteps"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def weights(self) -> Path:
        return self.path / "weights"

    @property
    def workspaces(self) -> Path:
        return self.path / "workspaces"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def keys(self) -> Path:
        """Folder (0700) of the key files (0600) of engines and processes."""
        return self.path / "keys"

    @property
    def snapshot(self) -> Path:
        """File: a fold of the journals with the offsets it reached. It may be absent, and may be thrown away."""
        return self.path / "snapshot"

    def index_path(self, writer: str) -> Path:
        return self.journal / f"{checked_name(writer)}.index"

    def journal_path(self, writer: str, incarnation: int) -> Path:
        return self.journal / f"{checked_name(writer)}.{incarnation}.jsonl"

    def alive_path(self, name: str) -> Path:
        return self.alive / checked_name(name)

    def shard_dir(self, writer: str) -> Path:
        return self.trajectories / checked_name(writer)

    def routing_path(self, writer: str, incarnation: int) -> Path:
        return self.shard_dir(writer) / f"{incarnation}.routing.arrows"

    def microstep_dir(self, step: int) -> Path:
        return self.microsteps / f"step-{step:06d}"

    def checkpoint_path(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:06d}.zarr"

    def log_dir(self, attempt: int) -> Path:
        return self.logs / f"attempt-{attempt}"

    def create(self) -> RunFolder:
        """Makes the folder (0700) and its places. Raises UserError when something is there already."""
        places = (
            self.launch,
            self.journal,
            self.alive,
            self.trajectories,
            self.microsteps,
            self.checkpoints,
            self.weights,
            self.workspaces,
            self.logs,
            self.keys,
        )
        with ledger_writes(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self.path.mkdir(mode=0o700)
            except FileExistsError:
                raise self.taken() from None
            for place in places:
                place.mkdir(mode=0o700)
            fsync_folder(self.path)
            fsync_folder(self.path.parent)
        return self

    def taken(self) -> UserError:
        return UserError(f"{self.path} exists already: name another run, or gyre resume it")

    def exists(self) -> bool:
        return self.journal.is_dir()


def cache_home() -> Path:
    """What can be made again (models, harnesses, engines): the environment's GYRE_CACHE, else gyre below the user's
    cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("GYRE_CACHE") or Path(base) / "gyre")


def runs_home() -> Path:
    """Where runs live: the environment's GYRE_RUNS, else ./runs."""
    return Path(os.environ.get("GYRE_RUNS") or "runs").absolute()


def _submitted(run: RunFolder) -> int:
    """When the run was submitted: the recipe is frozen then and never written again."""
    frozen = run.recipe if run.recipe.exists() else run.path
    return frozen.stat().st_mtime_ns


def list_runs() -> list[RunFolder]:
    """The runs below `runs_home()`, newest first."""
    home = runs_home()
    if not home.is_dir():
        return []
    runs = [run for child in home.iterdir() if (run := RunFolder(child)).exists()]
    return sorted(runs, key=lambda run: (_submitted(run), run.name), reverse=True)


def find_run(name_or_path: str | Path | None = None) -> RunFolder:
    """The run with this name or path; the newest one for None. Raises UserError when there is none."""
    if name_or_path is None:
        runs = list_runs()
        if not runs:
            raise UserError(f"no runs in {runs_home()}: submit a recipe, or set GYRE_RUNS")
        return runs[0]
    for path in (runs_home() / name_or_path, Path(name_or_path)):
        run = RunFolder(path)
        if run.exists():
            return run
    known = difflib.get_close_matches(str(name_or_path), [run.name for run in list_runs()], n=1)
    hint = f": did you mean {known[0]}?" if known else ": see gyre list"
    raise UserError(f"no run {str(name_or_path)!r} in {runs_home()}{hint}")
