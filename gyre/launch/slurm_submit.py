"""Submission to Slurm: the script kept in RUN/launch/, the job id in job.toml.

submitit carries the submission (a file, sbatch, the job's id). The rest of it is left aside: it renders no
heterogeneous jobs, its watcher needs accounting, and its results are pickles, where ours are the ledger. Invariant: a
job id is in job.toml as soon as Slurm gave it; a submission that Slurm refuses is shown in Slurm's own words.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
from pathlib import Path

import msgspec

from gyre.errors import UserError
from gyre.launch.slurm_code import code_version, snapshot
from gyre.launch.slurm_script import Program, render
from gyre.ledger.job import read_job, write_job
from gyre.ledger.layout import RunFolder
from gyre.recipe.schema import Recipe


def submit_run(run: RunFolder, recipe: Recipe) -> str:
    """Render, submit and record; the id of the job (its first component's). Raises UserError with Slurm's words."""
    script = render(recipe, Program(sys.executable, run.path, snapshot(run)))
    job = read_job(run)
    if not job.job_ids:
        write_job(run, msgspec.structs.replace(job, code=code_version()))
    job_id = send(script, run.launch)
    job = read_job(run)
    write_job(run, msgspec.structs.replace(job, job_ids=[*job.job_ids, job_id]))
    return job_id


def submit_new(run: RunFolder, recipe: Recipe) -> str:
    """As `submit_run`, for a folder made just now: a submission that is refused leaves none."""
    try:
        return submit_run(run, recipe)
    except UserError:
        shutil.rmtree(run.path)
        raise


def dry_run(recipe: Recipe, run: Path) -> str:
    """The script that a submission would send, for a run folder that does not exist yet."""
    from gyre.launch.slurm_code import checkout

    return render(recipe, Program(sys.executable, run, run / "launch" / "code" if checkout() else None))


def send(script: str, folder: Path) -> str:
    """sbatch; the script stays in `folder` as <job id>_submission.sh.

    A job that submits another one does not hand on what Slurm told it of itself.
    """
    from submitit.core.utils import FailedJobError, FailedSubmissionError
    from submitit.slurm.slurm import SlurmExecutor

    class HeterogeneousExecutor(SlurmExecutor):
        """submitit's executor with a script of our own: several components in one text."""

        @classmethod
        def affinity(cls) -> int:
            return min(1, super().affinity())  # below 2, so that AutoExecutor's choice stays "slurm"

        def _make_submission_file_text(self, command: str, uid: str) -> str:
            return command

        def _make_submission_command(self, submission_file_path: Path) -> list[str]:
            inherited = [name for name in os.environ if name.startswith("SLURM_") and name != "SLURM_CONF"]
            return ["env", *(f"--unset={name}" for name in inherited), "sbatch", str(submission_file_path)]

    try:
        executor = HeterogeneousExecutor(folder=folder)
    except RuntimeError:
        raise UserError("there is no srun here: submit on a login node of the cluster, or run with --local") from None
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # submitit prints what it also raises
            return executor._submit_command(script).job_id
    except (FailedJobError, FailedSubmissionError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise UserError("; ".join(lines) or "sbatch failed and did not say why", code=1) from None
