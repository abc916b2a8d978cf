"""Nodes die, steps die, the job is put back into the queue: the run goes on and nothing is done twice."""

from __future__ import annotations

from collections.abc import Callable

import psutil
import pytest

from gyre.views.runs import OpenRun
from tests.slurm.cluster import Cluster, Submitted, wait

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

Make = Callable[..., Submitted]
STEPS = 4
MANY = 24
"""So that the run still goes on when Slurm has noticed the loss of a node."""


def host(run: OpenRun, name: str) -> str:
    """The node of a process's newest incarnation."""
    opened = run.state.opened[name]
    return opened[max(opened)].host


def finished(run: Submitted, steps: int = STEPS) -> None:
    """It ended well: every step is there once, and the audit finds no breach."""
    status = run.wait_for_state("finished", "failed", "cancelled")
    assert status["state"] == "finished", run.explain()
    assert [step["step"] for step in status["steps"]] == list(range(1, steps + 1))
    run.verify()


def test_the_signal_before_the_end_stops_the_run_and_it_goes_on_in_the_same_job(
    cluster: Cluster, submitted: Make
) -> None:
    run = submitted(f"train.steps={STEPS}").submit()
    run.wait_for_step(1)
    job_id = run.job_id
    cluster.slurm("scancel", "--batch", "--signal=USR2", job_id)
    finished(run)
    opened = run.opened
    assert opened.job.job_ids == [job_id]
    assert opened.job.attempt == 2
    assert len(opened.state.opened["scheduler"]) == 2


def test_a_requeue_without_warning_resumes(cluster: Cluster, submitted: Make) -> None:
    run = submitted(f"train.steps={STEPS}").submit()
    run.wait_for_step(1)
    graded = run.opened.state.tally.graded
    cluster.slurm("scontrol", "requeue", run.job_id)
    finished(run)
    opened = run.opened
    assert opened.job.attempt == 2
    assert opened.state.tally.graded == STEPS * 8 >= graded


def test_the_loss_of_the_batch_node_requeues_the_job(cluster: Cluster, submitted: Make) -> None:
    run = submitted(f"train.steps={STEPS}").submit()
    run.wait_for_step(1)
    cluster.call("kill", "cpu1")
    wait(lambda: bool(list(run.opened.run.launch.glob("rescue-*"))), "a cell's guard rescues the job", 60, run.explain)
    assert next(run.opened.run.launch.glob("rescue-*")).read_text() == "cell-0 on gpu1\n"
    wait(lambda: run.status()["state"] == "pending", "the job is in the queue", 60, run.explain)
    cluster.call("start", "cpu1")
    finished(run)


@pytest.mark.parametrize("node", ["gpu1", "gpu2"])
def test_the_loss_of_a_cells_node_leaves_the_others_going(cluster: Cluster, submitted: Make, node: str) -> None:
    """The core moves to the node that is left; the satellite gets another node, in a job of its own."""
    run = submitted(f"train.steps={MANY}").submit()
    run.wait_for_step(1)
    cluster.call("kill", node)
    opened = run.wait_for(lambda run: host(run, "cell-1") in ("gpu3", "gpu4"), "cell-1 has another node")
    assert host(opened, "cell-0") == ("gpu2" if node == "gpu1" else "gpu1")
    finished(run, MANY)
    assert run.opened.job.attempt == 1


def test_a_workers_node_that_comes_back_has_its_worker_again(cluster: Cluster, submitted: Make) -> None:
    run = submitted(f"train.steps={MANY}", 'slurm.cpu.extra=["--exclusive"]').submit()
    run.wait_for_step(1)
    cluster.call("kill", "cpu2")
    guest = run.opened.run.launch / "guest-worker-1"
    wait(guest.exists, "worker-1 waits for a node in a job of its own", 120, run.explain)
    before = max(run.opened.state.opened["worker-1"])
    cluster.call("start", "cpu2")
    run.wait_for(lambda opened: max(opened.state.opened["worker-1"]) > before, "worker-1 is back")
    assert host(run.opened, "worker-1") == "cpu2"
    finished(run, MANY)


def test_a_step_that_is_cancelled_starts_again(cluster: Cluster, submitted: Make) -> None:
    run = submitted(f"train.steps={STEPS}").submit()
    run.wait_for_step(1)
    steps = dict(line.split("|") for line in cluster.slurm("squeue", "-h", "-s", "-o", "%j|%i").splitlines())
    cluster.slurm("scancel", steps["cell-0"])
    run.wait_for(lambda opened: len(opened.state.opened["cell-0"]) >= 2, "cell-0 starts again")
    finished(run)


@pytest.mark.parametrize("name", ["processor", "scheduler", "worker-1", "cell-1"])
def test_a_step_whose_guard_is_killed_starts_again(submitted: Make, name: str) -> None:
    """The guard cannot say a word then: the step counts as lost, whatever status srun ends with."""
    run = submitted(f"train.steps={STEPS}").submit()
    run.wait_for_step(1)
    guard(run, name).kill()
    run.wait_for(lambda opened: len(opened.state.opened[name]) >= 2, f"{name} starts again")
    finished(run)


def guard(run: Submitted, name: str) -> psutil.Process:
    """The process on the node, which has the step's daemon for a parent (its srun has the same words)."""
    words = {"gyre.launch.slurm_step", str(run.opened.run.path), name}
    found = [
        process
        for process in psutil.process_iter(["cmdline"])
        if words <= set(process.info["cmdline"] or ()) and "srun" not in process.info["cmdline"][0]
    ]
    assert len(found) == 1, found
    return found[0]


def test_cells_of_another_job_join_and_may_go_at_any_time(cluster: Cluster, submitted: Make) -> None:
    run = submitted(f"train.steps={MANY}").submit()
    run.wait_for_step(1)
    said = run.gyre("join", "--cells", "1", "--partition", "spot")
    guest = said.split()[-1]
    run.wait_for(lambda opened: any(c.training[0] for c in opened.state.cells.get("cell-2", {}).values()), "it trains")
    cluster.slurm("scancel", guest)
    finished(run, MANY)
    assert "cell-2" in {cell["name"] for cell in run.status()["cells"]}


def test_guests_that_are_preempted_come_back(cluster: Cluster, submitted: Make) -> None:
    run = submitted(f"train.steps={MANY}").submit()
    run.wait_for_step(1)
    run.gyre("join", "--cells", "1", "--partition", "spot")
    opened = run.wait_for(lambda opened: "cell-2" in opened.state.opened, "it has joined")
    node = host(opened, "cell-2")
    cluster.slurm("sbatch", "-p", "gpu", "-w", node, "--exclusive", "--output=/dev/null", "--wrap", "sleep 1")
    run.wait_for(lambda opened: len(opened.state.opened["cell-2"]) >= 2, "it has joined again")
    finished(run, MANY)
