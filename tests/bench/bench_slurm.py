"""Runs on a Slurm cluster of the bench's own (as root): how long Slurm and the ledger take, and what failures cost.

    python -m tests.bench.bench_slurm [--cells 4] [--steps 4]

Prints: submission to first sampled token; requeue to first sampled token; order of the scheduler to acknowledgement;
and for each failure the seconds to the next committed step and the work that was done again. All processes share this
machine's clock, so the journals' display times can be compared.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from gyre.ledger import events as ev
from gyre.ledger.job import read_job
from gyre.ledger.layout import RunFolder
from gyre.ledger.shards import TurnReader
from gyre.ledger.view import LedgerView
from gyre.views.runs import OpenRun
from tests.slurm.cluster import ENDLESS, Cluster, Submitted, reached
from tests.slurm.test_failures import guard, host
from tests.tasks import graded_at_random


def first_token(run: RunFolder, after: float) -> float:
    """Seconds from `after` to the first token sampled since."""
    turns = [turn for worker in read_job(run).workers for turn in TurnReader(run, worker).read_all()]
    return min((turn.first_token for turn in turns if turn.first_token > after), default=float("nan")) - after


def latencies(run: RunFolder) -> tuple[list[float], list[float]]:
    """Seconds from a role order to the first state that its cell enters, and from new routes to their last
    acknowledgement."""
    roles: dict[tuple[str, int], float] = {}
    routed: dict[tuple[int, int], float] = {}
    entered: list[float] = []
    acknowledged: dict[tuple[int, int], float] = {}
    lines = sorted(LedgerView(run, snapshot=False).poll(), key=lambda line: line.t)
    for line in lines:
        event = line.event
        if isinstance(event, ev.TrainOrdered | ev.ServeOrdered):
            roles[event.cell, event.incarnation] = line.t
        elif isinstance(event, ev.CellEntered) and (line.writer, line.incarnation) in roles:
            entered.append(line.t - roles.pop((line.writer, line.incarnation)))
        elif isinstance(event, ev.Routed):
            routed[line.incarnation, line.n] = line.t
        elif isinstance(event, ev.RoutesAcknowledged) and (event.epoch, event.n) in routed:
            acknowledged[event.epoch, event.n] = line.t - routed[event.epoch, event.n]
    return sorted(entered), sorted(acknowledged.values())


def spread(seconds: list[float]) -> str:
    worst = seconds[min(len(seconds) - 1, int(0.99 * len(seconds)))]
    return f"p50 {1000 * statistics.median(seconds):.0f} ms, p99 {1000 * worst:.0f} ms of {len(seconds)}"


def commits(run: RunFolder) -> list[tuple[float, int]]:
    """(time, step) of every commit, in the order of time."""
    lines = LedgerView(run, snapshot=False).poll()
    return sorted((line.t, line.event.step) for line in lines if isinstance(line.event, ev.Committed))


def repeated(run: RunFolder) -> tuple[int, int, int]:
    """(steps committed again, executions dispatched again, tokens that were sampled for attempts given up)."""
    steps = [step for _, step in commits(run)]
    view = LedgerView(run, snapshot=False)
    view.poll()
    last = {name: execution.last() for name, execution in view.state.executions.items()}
    turns = [turn for worker in read_job(run).workers for turn in TurnReader(run, worker).read_all()]
    lost = sum(len(turn.output) for turn in turns if turn.attempt < last.get(turn.execution, 0))
    return len(steps) - len(set(steps)), sum(number - 1 for number in last.values() if number), lost


def failures(run: Submitted) -> dict[str, Callable[[], object]]:
    """What is done to the run, in this order."""
    cluster = run.cluster

    def step(name: str) -> None:
        steps = dict(line.split("|") for line in cluster.slurm("squeue", "-h", "-s", "-o", "%j|%i").splitlines())
        cluster.slurm("scancel", steps[name])

    return {
        "a worker's guard is killed": lambda: guard(run, "worker-1").kill(),
        "the scheduler's guard is killed": lambda: guard(run, "scheduler").kill(),
        "a satellite's step is cancelled": lambda: step("cell-1"),
        "the core's step is cancelled": lambda: step("cell-0"),
        "a satellite's node is lost": lambda: cluster.call("kill", host(run.opened, "cell-1")),
        "signal before the end, requeue": lambda: cluster.slurm("scancel", "--batch", "--signal=USR2", run.job_id),
        "requeue without warning": lambda: cluster.slurm("scontrol", "requeue", run.job_id),
    }


def measure_failures(run: Submitted) -> None:
    run.submit()
    run.wait_for_step(4)
    folder = run.opened.run
    each = statistics.median(after - before for (before, _), (after, _) in pairwise(commits(folder)))
    print(f"a step: {each:.1f} s (median)")
    for name, fail in failures(run).items():
        before, newest = repeated(folder), reached(run.opened)
        began = time.time()
        fail()
        run.wait_for(lambda opened, newest=newest: progressed(opened, newest), f"progress after: {name}", ending=True)
        seconds = min(t for t, step in commits(folder) if t > began and step > newest) - began
        again = [now - then for now, then in zip(repeated(folder), before, strict=True)]
        print(f"{name}: next step after {seconds:.1f} s; done again: {again[0]} steps, ", end="")
        print(f"{again[1]} executions, {again[2]} sampled tokens lost")
        run.wait_for_step()
    run.cancel()


def progressed(opened: OpenRun, newest: int) -> bool:
    return reached(opened) > newest


def measure_times(run: Submitted, steps: int) -> None:
    began = time.time()
    run.submit()
    folder = run.opened.run
    run.wait_for_step()
    requeued = time.time()
    run.cluster.slurm("scontrol", "requeue", run.job_id)
    run.wait_for_attempt(2)
    run.wait_for_step(steps)
    run.cancel()
    print(f"submission to first sampled token: {first_token(folder, began):.1f} s")
    print(f"requeue to first sampled token: {first_token(folder, requeued):.1f} s")
    entered, acknowledged = latencies(folder)
    print(f"role order to the cell's answer: {spread(entered)}")
    print(f"new routes to the last acknowledgement: {spread(acknowledged)}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cells", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="gyre-bench-"))
    cache = Path(os.environ.get("GYRE_CACHE", home / "cache"))
    tasks = graded_at_random(home / "tasks")
    cluster = Cluster(Path(tempfile.mkdtemp(prefix="gs-", dir="/tmp")))
    cluster.call("install")
    cluster.call("start")
    try:
        for name, measure, settings in (
            ("times", lambda run: measure_times(run, options.steps), (f"cells.count={options.cells}",)),
            ("failures", measure_failures, ()),
        ):
            (home / name).mkdir()
            measure(Submitted(cluster, home / name, cache, tasks, ENDLESS, *settings))
            cluster.heal()
    finally:
        cluster.call("stop")


if __name__ == "__main__":
    main()
