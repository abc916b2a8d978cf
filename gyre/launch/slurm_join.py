"""Jobs that give a run more nodes: cells that join it, and a new home for a process whose node was lost.

Owns the files RUN/launch/guest-<process>, which say which job has that process. Invariant: a process is kept going by
one job at a time: a name is given to a job only when the one before it is over, and a new attempt of the run takes its
own processes back.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from gyre.errors import UserError
from gyre.launch import slurm_queue
from gyre.launch.slurm_places import group_of
from gyre.launch.slurm_queue import SlurmSilent
from gyre.launch.slurm_script import GPU_GROUP, Program, render_guests
from gyre.launch.slurm_submit import send
from gyre.ledger.files import write_atomic
from gyre.ledger.job import Job, read_job
from gyre.ledger.layout import RunFolder
from gyre.recipe.schema import Recipe


def claim_path(run: RunFolder, name: str) -> Path:
    return run.launch / f"guest-{name}"


def free_guests(run: RunFolder, job: Job, count: int) -> list[str]:
    """Names of cells that no live job has. Raises UserError when there are too few, SlurmSilent."""
    live = _live(run, job.guests)
    free = [cell for cell in job.guests if cell not in live]
    if len(free) < count:
        raise UserError(f"--cells {count}: {len(free)} of {len(job.guests)} places for guests are free in {run.name}")
    return free[:count]


def _live(run: RunFolder, names: Iterable[str]) -> dict[str, str]:
    """Which of these processes a job has that waits or runs."""
    claims = {name: claim_path(run, name).read_text() for name in names if claim_path(run, name).exists()}
    known = slurm_queue.ask(claims.values())
    return {name: job_id for name, job_id in claims.items() if job_id in known and not known[job_id].ended}


def join(run: RunFolder, recipe: Recipe, count: int, partition: str, time: str) -> tuple[str, list[str]]:
    """Submit a job of `count` cells; (its id, the cells' names). Raises UserError, SlurmSilent."""
    job = read_job(run)
    cells = free_guests(run, job, count)
    return _submit(run, recipe, job.of_cells(cells), partition, time), cells


def replace(run: RunFolder, recipe: Recipe, name: str) -> str:
    """Submit a job of one node for a process of the run's own that has lost its node; its id. Raises UserError."""
    return _submit(run, recipe, [name], "", "")


def _submit(run: RunFolder, recipe: Recipe, names: list[str], partition: str, time: str) -> str:
    code = run.launch / "code"
    program = Program(sys.executable, run.path, code if code.exists() else None)
    on_gpu = group_of(names[0]) == GPU_GROUP
    job_id = send(render_guests(recipe, program, names, on_gpu, partition, time), run.launch)
    for name in names:
        write_atomic(claim_path(run, name), job_id.encode())
    return job_id


def recall(run: RunFolder, names: Iterable[str]) -> list[str]:
    """End the jobs that have these processes of the run's own; their ids. Silent Slurm leaves them: they are fenced."""
    try:
        found = sorted(set(_live(run, names).values()))
        for job_id in found:
            slurm_queue.cancel(job_id)
    except SlurmSilent:
        return []
    return found
