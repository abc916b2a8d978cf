"""Runs on a real Slurm: from submission to the end, what status says meanwhile, and how they are ended."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.slurm.cluster import ENDLESS, Cluster, Submitted, wait

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

Make = Callable[..., Submitted]
SHARED = (
    'slurm.cpu.extra=["--nodelist=cpu[1-2]"]',
    'slurm.gpu.extra=["--nodelist=gpu[1-2]"]',
    "slurm.gpu.gres=gpu:2",
)
"""For two runs at once on the same nodes."""


def test_a_run_goes_from_submission_over_waiting_to_its_end(cluster: Cluster, submitted: Make) -> None:
    """Its cells have two nodes each."""
    steps = 3
    held = ('slurm.cpu.extra=["--hold"]', 'slurm.gpu.extra=["--hold"]')
    run = submitted(f"train.steps={steps}", "cells.nodes_per_cell=2", "train.data_parallel=2", *held)
    run.submit()
    opened = run.opened
    script = (opened.run.launch / f"{run.job_id}_submission.sh").read_text()
    assert script.splitlines()[0] == "#!/bin/bash"
    assert opened.job.code.startswith("0.")
    assert (opened.run.launch / "code" / "gyre" / "__init__.py").exists()
    status = run.status()
    assert (status["state"], status["slurm"]["state"]) == ("pending", "PENDING")
    wait(lambda: "JobHeldUser" in run.status()["reason"], "status says why it waits", run.explain)
    assert "resume" not in run.gyre("resume", code=2)
    cluster.slurm("scontrol", "release", run.job_id)
    run.wait_for_step()
    assert run.status()["state"] == "running"
    run.finish(steps)
    status = run.status()
    assert all(step["reward"] is not None for step in status["steps"])
    assert status["slurm"]["state"] in ("COMPLETED", "COMPLETING")
    hosts = {name: opened[1].host for name, opened in run.opened.state.opened.items() if name != "control"}
    assert hosts == {
        "supervisor": "cpu1",
        "scheduler": "cpu1",
        "processor": "cpu1",
        "worker-0": "cpu1",
        "worker-1": "cpu2",
        "cell-0": "gpu1",
        "agent-0-1": "gpu2",
        "cell-1": "gpu3",
        "agent-1-1": "gpu4",
    }
    name = run.opened.run.name
    assert "worker-1" in run.gyre("logs")
    assert "attempt 1" in run.gyre("logs", name, f"job-{run.job_id}")
    assert f"{name} " in run.gyre("list")


def test_a_run_that_waits_can_be_cancelled(cluster: Cluster, submitted: Make) -> None:
    run = submitted('slurm.gpu.extra=["--begin=now+1hour"]', 'slurm.cpu.extra=["--begin=now+1hour"]')
    run.submit()
    wait(lambda: "BeginTime" in run.status()["reason"], "it waits for its time", run.explain)
    run.gyre("cancel")
    assert run.wait_for_state("cancelled")["slurm"]["state"] == "CANCELLED"


def test_two_runs_on_the_same_nodes_end_each_on_its_own(cluster: Cluster, submitted: Make) -> None:
    """One is cancelled by its user; the other one by Slurm, which makes it dead, and goes on in a new job."""
    cancelled, dead = (submitted(ENDLESS, *SHARED) for _ in range(2))
    for run in (cancelled, dead):
        run.submit()
    for run in (cancelled, dead):
        run.wait_for_step()
    first = dead.job_id
    cluster.slurm("scancel", first)
    status = dead.wait_for_state("failed", "cancelled")
    assert status["state"] == "failed"
    assert status["reason"].startswith(f"dead: job {first} is cancelled")
    cancelled.wait_for_step()
    cancelled.cancel()
    steps = max(dead.opened.state.history()) + 2
    dead.gyre("resume", "--set", f"train.steps={steps}")
    assert dead.job_id != first
    dead.finish(steps)


def test_a_users_mistake_in_the_job_is_the_reason_of_its_failure(cluster: Cluster, submitted: Make) -> None:
    run = submitted("harness.version=9.9")
    run.submit()
    status = run.wait_for_state("failed")
    assert "9.9" in status["reason"]
    assert "failed" in run.gyre("list")


def test_what_slurm_refuses_is_shown_in_its_words(cluster: Cluster, submitted: Make) -> None:
    # held: Slurm 22.05 loses track of a first component that it starts while it refuses the second
    run = submitted("slurm.gpu.partition=nowhere", 'slurm.cpu.extra=["--hold"]')
    said = run.submit(code=1)
    assert said.startswith("gyre: sbatch: error: invalid partition specified: nowhere")
    assert said.count("\n") == 1
    assert list(run.home.iterdir()) == []
