"""Opening a run for reading: its recipe, its folded state, and whether anybody keeps it going.

Invariant: reading never changes a run.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from gyre.ledger.identity import still_runs
from gyre.ledger.job import Job, read_job
from gyre.ledger.layout import RunFolder, find_run
from gyre.ledger.state import RunState
from gyre.ledger.view import LedgerView
from gyre.recipe.load import load_recipe
from gyre.recipe.schema import Recipe
from gyre.views.summary import Summary, summarise


@dataclass
class OpenRun:
    run: RunFolder
    recipe: Recipe
    job: Job
    view: LedgerView

    @property
    def state(self) -> RunState:
        return self.view.state

    def summary(self) -> Summary:
        return summarise(
            self.state, self.recipe, self.run.name, str(self.run.path), alive=supervised(self.state, self.job)
        )


def open_run(name: str | Path | None) -> OpenRun:
    """The run of that name or path, the newest one for None; everything that its journals say is folded."""
    return read_run(find_run(name))


def read_run(run: RunFolder) -> OpenRun:
    opened = OpenRun(run, load_recipe(run.recipe, folders=False), read_job(run), LedgerView(run))
    opened.view.poll()
    return opened


def supervised(state: RunState, job: Job) -> bool:
    """Is the run's supervisor alive? Only its own machine can tell; elsewhere, and under Slurm, take it as given."""
    opened = state.opened.get("supervisor", {})
    if job.launcher != "local" or not opened:
        return True
    newest = opened[max(opened)]
    if newest.host != socket.gethostname():
        return True
    return still_runs(newest.pid, newest.pid_start)
