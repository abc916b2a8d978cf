"""Evaluation of a run's weights, or of a model: a run without steps, whose only burst is held-out tasks.

Owns what such a run's recipe is made from. Invariant: the evaluated run's recipe decides how its agents work (harness,
sandbox, sampling, limits), so that the score is of the same thing that was trained; its folder is only read, but for
the exported weights, which are kept in `exports/`.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gyre.errors import UserError
from gyre.launch.submit import Plan, plan
from gyre.ledger.checkpoints import chosen
from gyre.ledger.job import read_job
from gyre.ledger.layout import find_run
from gyre.ledger.view import LedgerView


@dataclass(frozen=True)
class Subject:
    """What is evaluated: a model's folder, and the recipe by which its agents work."""

    name: str
    model: Path
    recipe: Path


def find_subject(target: str, recipe: Path | None, step: int, say: Callable[[str], None]) -> Subject:
    """`target` is a Hugging Face folder (which needs a recipe), or a run's name or path. Raises UserError."""
    folder = Path(target)
    if (folder / "config.json").is_file():
        if recipe is None:
            raise UserError(f"{target} is a model: say with --recipe how its agents work")
        if step:
            raise UserError(f"--step {step}: {target} is a model, and has no steps")
        return Subject(folder.resolve().name, folder.resolve(), recipe)
    run = find_run(target)
    view = LedgerView(run)
    view.poll()
    info, _ = chosen(run.checkpoints, step, view.state.openings())
    if info is None:
        say(f"{run.name} has no checkpoint yet: evaluating the model that it started from")
        return Subject(run.name, Path(read_job(run).model), recipe or run.recipe)
    out = run.path / "exports" / f"step-{info.meta.step:06d}-lineage-{info.meta.lineage}"
    if not out.is_dir():
        say(f"exporting {info.path.name} to {out}")
        _export(info.path, Path(read_job(run).model), out)
    return Subject(f"{run.name}-step-{info.meta.step}", out, recipe or run.recipe)


def _export(checkpoint: Path, model: Path, out: Path) -> None:
    from gyre.training.export import export_checkpoint

    out.parent.mkdir(mode=0o700, exist_ok=True)
    aside = out.with_name(f"{out.name}.{uuid.uuid4().hex[:8]}")
    try:
        export_checkpoint(checkpoint, model, aside)
        os.rename(aside, out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def plan_evaluation(subject: Subject, tasks: Path, samples: int, settings: list[str], local: bool) -> Plan:
    """The plan of a run that only evaluates. Raises UserError."""
    folder = tasks.absolute()
    return plan(
        subject.recipe,
        [
            f'name="eval-{subject.name}"',
            f'model.path="{subject.model}"',
            'model.build=""',
            f'tasks.path="{folder}"',
            f'eval.path="{folder}"',
            "eval.every=1",
            f"eval.samples={samples}",
            "train.steps=0",
            'schedule.mode="elastic"',  # every cell serves
            *settings,
        ],
        local=local,
    )
