"""Nodes die, steps die, the job is put back into the queue: the run goes on and nothing is done twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import psutil
import pytest

from gyre.views.runs import OpenRun
from tests.slurm.cluster import ENDLESS, Cluster, Submitted, wait

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

Make = Callable[..., Submitted]


def host(run: OpenRun, name: str) -> str:
    """The node of a process's newest incarnation."""
    opened = run.state.opened[name]
    return opened[max(opened)].host


def test_a_job_that_goes_back_into_the_queue_goes_on(cluster: Cluster, submitted: Make) -> None:
    """By `scontrol requeue`, by the signal before its end, and after the loss of its batch node."""
    run = submitted(ENDLESS, "train.checkpoint_every=100000", "tasks.interrupted=grade")
    run.submit()
    job_id = run.job_id
    run.wait_for_step()

    cluster.slurm("scontrol", "requeue", job_id)
    run.wait_for_attempt(2)
    done = run.wait_for_step()

    cluster.slurm("scancel", "--batch", "--signal=USR2", job_id)
    run.wait_for_attempt(3)
    opened = run.wait_for(lambda opened: len(opened.state.lineages) >= 3, "lineage 3 opens")
    first, second, third = (opened.state.lineages[number].opened.step for number in (1, 2, 3))
    assert (first, second) == (0, 0), "nothing was saved before the requeue"
    assert third >= done, "the signal before the end lost a step"
    run.wait_for_step()

    cluster.call("kill", "cpu1")
    wait(lambda: bool(rescuers(opened)), "a cell's guard rescues the job", run.explain)
    assert rescuers(opened) in (["cell-0 on gpu1"], ["cell-1 on gpu2"]), "one does, of those that are left"
    wait(lambda: run.status()["state"] == "pending", "the job is in the queue", run.explain)
    cluster.call("start", "cpu1")
    opened = run.wait_for_attempt(4)
    run.wait_for_step()
    run.cancel()
    assert opened.job.job_ids == [job_id]
    assert run.opened.job.attempt == 4


def rescuers(opened: OpenRun) -> list[str]:
    return [text for path in opened.run.launch.glob("rescue-*") if (text := path.read_text().strip())]


def test_a_step_that_ends_starts_again_in_its_place(cluster: Cluster, submitted: Make) -> None:
    """Cancelled by Slurm, or its guard killed, which cannot say a word then: the step counts as lost."""
    run = submitted(ENDLESS)
    run.submit()
    run.wait_for_step()
    steps = dict(line.split("|") for line in cluster.slurm("squeue", "-h", "-s", "-o", "%j|%i").splitlines())
    run.wait_for_restart("cell-0", lambda: cluster.slurm("scancel", steps["cell-0"]))
    run.wait_for_step()
    for names in (("processor", "cell-1"), ("scheduler", "worker-1")):
        run.wait_for_restarts(names, partial(kill_guards, run, names))
    run.wait_for_step(2)
    run.cancel()
    assert run.opened.job.attempt == 1


def kill_guards(run: Submitted, names: Sequence[str]) -> None:
    for found in [guard(run, name) for name in names]:
        found.kill()


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


def test_the_loss_of_nodes_leaves_the_others_going(cluster: Cluster, submitted: Make) -> None:
    """The core moves to the satellite's node; worker and satellite get other nodes, in jobs of their own."""
    run = submitted(ENDLESS, 'slurm.cpu.extra=["--exclusive"]')
    run.submit()
    run.wait_for_step()
    cluster.call("kill", "gpu1")
    cluster.call("kill", "cpu2")
    moved = {"cell-0": ("gpu2",), "cell-1": ("gpu3", "gpu4")}
    opened = run.wait_for(lambda run: all(host(run, c) in nodes for c, nodes in moved.items()), "the cells have moved")
    guest = opened.run.launch / "guest-worker-1"
    wait(guest.exists, "worker-1 waits for a node in a job of its own", run.explain)
    run.wait_for_step()
    run.wait_for_restart("worker-1", lambda: cluster.call("start", "cpu2"))
    assert host(run.opened, "worker-1") == "cpu2"
    run.wait_for_step()
    run.cancel()
    assert run.opened.job.attempt == 1


def test_cells_of_another_job_join_and_may_go_at_any_time(cluster: Cluster, submitted: Make) -> None:
    run = submitted(ENDLESS)
    run.submit()
    run.wait_for_step()
    guest = run.gyre("join", "--cells", "1", "--partition", "spot").split()[-1]
    trains = run.wait_for(lambda o: any(c.training[0] for c in o.state.cells.get("cell-2", {}).values()), "it trains")
    preempting = ["-p", "gpu", "-w", host(trains, "cell-2"), "--exclusive", "--output=/dev/null", "--wrap", "sleep 1"]
    run.wait_for_restart("cell-2", lambda: cluster.slurm("sbatch", *preempting))
    cluster.slurm("scancel", guest)
    cluster.call("kill", "gpu2")
    run.wait_for(lambda opened: host(opened, "cell-1") in ("gpu3", "gpu4"), "the satellite has another node")
    run.wait_for_step(2)
    run.cancel()
    assert run.opened.job.attempt == 1
    assert "cell-2" in {cell["name"] for cell in run.status()["cells"]}
