"""Going on with a run: the checks, and the next attempt.

Invariant: a run that somebody still keeps going is refused: its liveness counters move, or its supervisor runs; of two
commands at the same moment one goes on, for an attempt is claimed by exclusive creation. What a predecessor left behind
is ended by the supervisor before anything starts.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

import msgspec

from gyre.errors import UserError
from gyre.launch.control import request_resume
from gyre.ledger.files import write_atomic, write_new
from gyre.ledger.identity import process_start, still_runs
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
    job = read_job(run)  # before we look: an attempt that another claims from here on is the one that we would
    recipe = load_recipe(run.recipe, overrides, folders=False)
    if state == "finished" and not overrides:
        raise UserError(f"{run.name} is finished: give it more to do with --set train.steps=N")
    moving = moving_counters(run, sleep)
    if moving:
        raise UserError(f"{run.name} is still alive ({moving[0]} beats): gyre cancel {run.name} first")
    pid = supervisor_of(run)
    if pid:
        raise UserError(f"{run.name} is still alive (its supervisor is process {pid}): gyre cancel {run.name} first")
    attempt = claim_attempt(run, job.attempt + 1)
    if overrides:
        write_atomic(run.recipe, dump_toml(recipe).encode())
    write_job(run, msgspec.structs.replace(job, attempt=attempt))
    request_resume(run)
    return recipe


def claim_attempt(run: RunFolder, attempt: int) -> int:
    """Make this attempt ours, or the next one whose claimant died before it began. Raises UserError."""
    while True:
        path = run.launch / f"attempt-{attempt}"
        try:
            write_new(path, f"{socket.gethostname()} {os.getpid()} {process_start():.0f}\n".encode())
            return attempt
        except FileExistsError:
            host, pid, start = path.read_text().split()
            if host != socket.gethostname() or still_runs(int(pid), float(start)):
                raise UserError(
                    f"{run.name}: another gyre resume (process {pid} on {host}) has just begun attempt {attempt}; look "
                    f"with gyre status {run.name}, or remove {path} if that process is gone"
                ) from None
            attempt += 1


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
