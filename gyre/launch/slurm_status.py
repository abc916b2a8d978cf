"""A run under Slurm, as people see it: what its ledger says, joined with what Slurm says of its job.

Invariant: the ledger's word on how a run ended stands, unless its job waits to go on with it; a job that Slurm lists as
running while the supervisor's counter stands still is silent, not dead; one that Slurm ended, or forgot, is dead.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import msgspec
from msgspec import Struct

from gyre.launch import slurm_queue
from gyre.launch.slurm_queue import JobState, SlurmSilent
from gyre.ledger.job import Job
from gyre.views.runs import OpenRun
from gyre.views.summary import State, Summary

ACTIVE = ("CONFIGURING", "RUNNING", "SUSPENDED", "STOPPED")
SILENT_SECONDS = 30.0
"""A supervisor beats each second; other clocks, and a slow file system, are forgiven this much."""


class Component(Struct, frozen=True):
    id: str
    state: str
    nodes: str


class SlurmSummary(Struct, frozen=True, kw_only=True):
    """The `slurm` of `gyre status --json`. `state` is "" when Slurm does not know the job (any more)."""

    job_id: str
    state: str
    reason: str = ""
    start: str = ""
    components: list[Component] = []
    problem: str = ""
    """why Slurm could not be asked"""


def newest_job(job: Job) -> str:
    return job.job_ids[-1] if job.launcher == "slurm" and job.job_ids else ""


def ask_slurm(jobs: Iterable[Job]) -> tuple[dict[str, JobState], str]:
    """What Slurm says of the newest job of each run, and why it says nothing."""
    try:
        return slurm_queue.ask(filter(None, map(newest_job, jobs))), ""
    except SlurmSilent as error:
        return {}, str(error)


def joined(opened: OpenRun, known: dict[str, JobState], problem: str) -> tuple[Summary, SlurmSummary | None]:
    """The summary of a run with Slurm's word in it; None for a run that is not Slurm's."""
    summary, job_id = opened.summary(), newest_job(opened.job)
    if opened.job.launcher != "slurm":
        return summary, None
    if not job_id:
        return msgspec.structs.replace(summary, state="failed", reason="it was never submitted; gyre resume"), None
    found = known.get(job_id)
    if problem:
        reason = f"Slurm does not say how job {job_id} is: {problem}"
        reason = summary.reason if opened.state.ended is not None else reason
        return (
            msgspec.structs.replace(summary, reason=reason),
            SlurmSummary(job_id=job_id, state="", problem=problem),
        )
    last = slurm_queue.last_state(job_id) if found is None and summary.state in ("pending", "running") else ""
    state, reason = judge(summary, job_id, found, last, bool(opened.state.cancel), silence(opened))
    return msgspec.structs.replace(summary, state=state, reason=reason), slurm_summary(job_id, found, last)


def slurm_summary(job_id: str, found: JobState | None, last: str) -> SlurmSummary:
    if found is None:
        return SlurmSummary(job_id=job_id, state=last)
    return SlurmSummary(
        job_id=job_id,
        state=found.state,
        reason=found.reason,
        start=found.start,
        components=[Component(c.shown, c.state, c.nodes) for c in found.components],
    )


def judge(
    summary: Summary, job_id: str, found: JobState | None, last: str, cancelled: bool, silent: float | None
) -> tuple[State, str]:
    """The state of a run and why. Pure; `silent`: seconds since the supervisor's last beat, None before the first.

    `last` is what accounting knows of a job that squeue has forgotten.
    """
    if found is not None and found.state == "PENDING" and not (cancelled and summary.state == "cancelled"):
        return "pending", waiting(found)
    if summary.state not in ("pending", "running"):
        if found is not None and found.state in ACTIVE:
            return "running", f"job {job_id} is about to end, or to go on"
        return summary.state, summary.reason
    if found is not None and not found.ended:
        if silent is None or summary.state == "pending":
            return "pending", f"job {job_id} is {found.state.lower()}: starting"
        if silent > SILENT_SECONDS:
            return "running", f"silent for {silent:.0f} s, while job {job_id} is {found.state.lower()}"
        return "running", ""
    ended = (found.state if found is not None else last).lower() or "not known to Slurm any more"
    if cancelled:
        return "cancelled", f"job {job_id}: {ended}"
    log = f"see launch/job-{job_id}.log; gyre resume goes on"
    return "failed", f"dead: job {job_id} is {ended.replace('_', ' ')}; {log}"


def waiting(found: JobState) -> str:
    reason = f"job {found.job_id} waits" + (f" ({found.reason})" if found.reason else "")
    return reason + (f", expected to start {found.start}" if found.start else "")


def silence(opened: OpenRun) -> float | None:
    """Seconds since the supervisor overwrote its counter, by the dates of the file system; for display only."""
    if "supervisor" not in opened.state.opened:
        return None
    try:
        return max(0.0, time.time() - opened.run.alive_path("supervisor").stat().st_mtime)
    except OSError:
        return None


def job_line(slurm: SlurmSummary) -> str:
    """One line for a terminal."""
    parts = [f"{c.id} {c.state.lower()}" + (f" on {c.nodes}" if c.nodes else "") for c in slurm.components]
    return f"job {slurm.job_id}: " + ("; ".join(parts) or slurm.problem or slurm.state.lower() or "not known to Slurm")
