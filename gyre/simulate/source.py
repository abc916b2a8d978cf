"""What is simulated: a workload's file, a recipe, or a run.

Owns how the argument of `gyre simulate` is understood, and what is assumed where nothing is known. Invariant: every
assumption is told in `notes`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gyre.errors import UserError
from gyre.ledger.layout import find_run
from gyre.ledger.view import LedgerView
from gyre.recipe.load import load_recipe
from gyre.recipe.schema import Recipe
from gyre.recipe.units import format_seconds
from gyre.simulate.jobs import Drawn, Job, Jobs, Recorded
from gyre.simulate.recorded import measured_seconds, recorded_workload
from gyre.simulate.study import PROBING
from gyre.simulate.workload import Cells, Executions, Group, Schedule, Training, Workload, override, workload_of

MODES = ("elastic", PROBING, "colocate", "async")
SHARE_OF_TIMEOUT = 1.0 / 3.0
"""A recipe says nothing about durations: assumed is this mean, as a share of the harness's timeout."""


@dataclass(frozen=True)
class Source:
    """`groups`: the recorded executions of a run; None: they are drawn."""

    workload: Workload
    groups: Sequence[Sequence[Job]] | None = None
    notes: tuple[str, ...] = ()

    def jobs_of(self, workload: Workload, seed: int) -> Jobs:
        return Drawn(workload, seed) if self.groups is None else Recorded(self.groups)

    def seeds(self, wanted: int) -> int:
        """Recorded executions are the same for every seed; only losses of cells are not."""
        return wanted if self.groups is None or self.workload.failures.between > 0.0 else 1


def find_source(what: str, overrides: Sequence[str]) -> Source:
    """Raises UserError."""
    path = Path(what)
    if not path.is_file():
        if path.suffix == ".toml":
            raise UserError(f"{path} does not exist")
        return of_run(what, overrides)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {error}") from None
    if "executions" in table:
        return Source(workload_of(table, overrides, what))
    return of_recipe(load_recipe(path, folders=False), overrides)


def of_run(name: str, overrides: Sequence[str]) -> Source:
    run = find_run(name)
    recipe, view = load_recipe(run.recipe, folders=False), LedgerView(run)
    view.poll()
    workload, groups = recorded_workload(view.state, recipe, run.name)
    changed = override(workload, overrides)
    if changed.group.executions != workload.group.executions:
        raise UserError(f"group.executions: the groups of {name} have {workload.group.executions} executions")
    own = recipe.schedule
    split = f" with {own.training_cells} training cells" if own.mode == "async" else ""
    took = format_seconds(round(measured_seconds(view.state)))
    return Source(changed, groups, (f"{run.name} itself took {took}, {own.mode}{split}",))


def of_recipe(recipe: Recipe, overrides: Sequence[str]) -> Source:
    """Durations and training times are assumed: training takes as many cell-hours as rollout does."""
    usual = SHARE_OF_TIMEOUT * recipe.tasks.harness_timeout
    training = usual / recipe.rollout.executions_per_cell
    workload = override(
        Workload(
            name=recipe.name,
            steps=recipe.train.steps,
            group=Group.of(recipe),
            schedule=Schedule.of(recipe),
            cells=Cells(count=recipe.cells.count, executions_per_cell=recipe.rollout.executions_per_cell),
            executions=Executions(mean=usual, timeout=recipe.tasks.harness_timeout),
            training=Training(work=training, microstep=max(1.0, training / 3.0)),
        ),
        overrides,
    )
    mean, work = (format_seconds(round(s)) for s in (workload.executions.mean, workload.training.work))
    assumed = (
        "a recipe does not say how long things take; assumed:"
        f" executions.mean={mean} training.work={work} (cell-seconds an execution)."
        " Set them with --set, or simulate a run"
    )
    return Source(workload, None, (assumed,))


def parse_modes(text: str) -> list[str]:
    modes = [mode.strip() for mode in text.split(",") if mode.strip()]
    for mode in modes:
        if mode not in MODES:
            raise UserError(f"--modes: {mode!r} is none of {', '.join(MODES)}")
    if not modes:
        raise UserError(f"--modes: name some of {', '.join(MODES)}")
    return list(dict.fromkeys(modes))


def parse_cells(text: str) -> list[int]:
    try:
        counts = [int(count) for count in text.split(",") if count.strip()]
    except ValueError:
        raise UserError(f"--cells: expected counts by commas, such as 4,8,16, got {text!r}") from None
    if any(count < 1 for count in counts):
        raise UserError("--cells: a run has one cell or more")
    return list(dict.fromkeys(counts))
