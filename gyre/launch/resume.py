"""Going on with a run: the checks, and the next attempt.

Invariant: a run that somebody still keeps going is refused: its liveness counters move, or its supervisor runs. What a
predecessor left behind is ended by the supervisor before anything starts.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

import msgspec

from gyre.errors import UserError
from gyre.launch.control import request_resume
from gyre.ledger.files import write_atomic
from gyre.ledger.identity import still_runs
from gyre.ledger.job import read_job, write_job
from gyre.ledger.layout import RunFolder
from gyre.ledger.liveness import read_counter
from gyre.ledger.view import LedgerView
from gyre.recipe.load import dump_toml, load_recipe
from gyre.recipe.schema import Recipe

WATCH_SECONDS = 2.5
"""More than two beats."""


def prepare_resume(
    run: RunFolder, state: str, overrides: list[str], sleep: Callable[[float], None] = time.sleep
) -> Recipe:
    """Check, apply overrides to the frozen recipe, and count the attempt. Raises UserError."""
    recipe = load_recipe(run.recipe, overrides, folders=False)
    if state == "finished" and not overrides:
        raise UserError(f"{run.name} is finished: give it more to do with --set train.steps=N")
    moving = moving_counters(run, sleep)
    if moving:
        raise UserError(f"{run.name} is still alive ({moving[0]} beats): gyre cancel {run.name} first")
    pid = supervisor_of(run)
    if pid:
        raise UserError(f"{run.name} is still alive (its supervisor is process {pid}): gyre cancel {run.name} first")
    if overrides:
        write_atomic(run.recipe, dump_toml(recipe).encode())
    job = read_job(run)
    write_job(run, msgspec.structs.replace(job, attempt=job.attempt + 1))
    request_resume(run)
    return recipe


def supervisor_of(run: RunFolder) -> int:
    """The process that supervises the run on this machine; 0 when there is none."""
    view = LedgerView(run)
    view.poll()
    opened = view.state.opened.get("supervisor", {})
    newest = opened.get(max(opened, default=0))
    if newest is None or newest.host != socket.gethostname():
        return 0
    return newest.pid if still_runs(newest.pid, newest.pid_start) else 0


def moving_counters(run: RunFolder, sleep: Callable[[float], None]) -> list[str]:
    """Processes whose liveness counter moves while we watch."""
    names = read_job(run).processes()
    before = {name: read_counter(run.alive_path(name)) for name in names}
    sleep(WATCH_SECONDS)
    return [name for name in names if read_counter(run.alive_path(name)) != before[name]]
