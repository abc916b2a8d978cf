"""Runs on a real Slurm: from submission to the end, what status says meanwhile, and how they are ended."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.slurm.cluster import Cluster, Submitted, wait

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

Make = Callable[..., Submitted]


def test_a_run_goes_from_submission_to_its_end(cluster: Cluster, submitted: Make) -> None:
    run = submitted().submit()
    opened = run.opened
    script = (opened.run.launch / f"{run.job_id}_submission.sh").read_text()
    assert script.splitlines()[0] == "#!/bin/bash"
    assert opened.job.code.startswith("0.")
    assert (opened.run.launch / "code" / "gyre" / "__init__.py").exists()
    status = run.wait_for_state("finished", "failed")
    assert status["state"] == "finished", run.explain()
    assert [step["step"] for step in status["steps"]] == [1, 2, 3]
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
        "cell-1": "gpu2",
    }
    run.verify()
    assert "worker-1" in run.gyre("logs") and "attempt 1" in run.gyre("logs", run.opened.run.name, f"job-{run.job_id}")
    assert f"{run.opened.run.name} " in run.gyre("list")


def test_a_run_that_waits_says_why_and_can_be_cancelled(cluster: Cluster, submitted: Make) -> None:
    run = submitted('slurm.gpu.extra=["--begin=now+1hour"]', 'slurm.cpu.extra=["--begin=now+1hour"]').submit()
    wait(lambda: "BeginTime" in run.status()["reason"], "it waits for its time", 30, run.explain)
    assert run.status()["state"] == "pending"
    assert "resume" not in run.gyre("resume", code=2)
    run.gyre("cancel")
    assert run.wait_for_state("cancelled")["slurm"]["state"] == "CANCELLED"


def test_cancel_ends_a_run_cleanly_and_resume_goes_on_in_a_new_job(cluster: Cluster, submitted: Make) -> None:
    run = submitted().submit()
    run.wait_for_step(1)
    run.gyre("cancel")
    status = run.wait_for_state("cancelled", "failed")
    assert (status["state"], status["reason"]) == ("cancelled", "gyre cancel")
    first = run.job_id
    run.gyre("resume")
    assert run.job_id != first
    status = run.wait_for_state("finished", "failed")
    assert [step["step"] for step in status["steps"]] == [1, 2, 3]
    run.verify()


def test_a_job_that_slurm_ended_is_dead_and_resume_goes_on(cluster: Cluster, submitted: Make) -> None:
    run = submitted().submit()
    run.wait_for_step(1)
    cluster.slurm("scancel", run.job_id)
    status = run.wait_for_state("failed", "cancelled")
    assert status["reason"].startswith(f"dead: job {run.job_id} is cancelled")
    run.gyre("resume")
    assert run.wait_for_state("finished", "failed")["state"] == "finished"
    run.verify()


def test_a_users_mistake_in_the_job_is_the_reason_of_its_failure(cluster: Cluster, submitted: Make) -> None:
    run = submitted("harness.version=9.9").submit()
    status = run.wait_for_state("failed")
    assert "9.9" in status["reason"]
    assert "job" in run.gyre("list") or "failed" in run.gyre("list")


def test_what_slurm_refuses_is_shown_in_its_words(cluster: Cluster, submitted: Make) -> None:
    run = submitted("slurm.gpu.partition=nowhere")
    said = run.gyre("submit", str(run.recipe), *run.settings, code=1)
    assert said.startswith("gyre: sbatch: error: invalid partition specified: nowhere")
    assert said.count("\n") == 1
    assert list(run.home.iterdir()) == []


def test_two_runs_at_once_on_the_same_nodes(cluster: Cluster, submitted: Make) -> None:
    shared = (
        'slurm.cpu.extra=["--nodelist=cpu[1-2]"]',
        'slurm.gpu.extra=["--nodelist=gpu[1-2]"]',
        "slurm.gpu.gres=gpu:2",
    )
    runs = [submitted("train.steps=2", f"seed={seed}", *shared).submit() for seed in (1, 1)]
    for run in runs:
        run.wait_for(lambda opened: "cell-1" in opened.state.opened, "its cells run")
    for run in runs:
        assert run.wait_for_state("finished", "failed")["state"] == "finished"
        run.verify()
