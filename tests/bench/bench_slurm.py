"""Runs on a Slurm cluster of the bench's own (as root): how long Slurm and the ledger take, and what failures cost.

    python -m tests.bench.bench_slurm [--cells 4] [--steps 4] [--only times|failures]
    python -m tests.bench.bench_slurm --read RUN...        runs that are over, such as those of `make test-slurm`

Prints: submission to first sampled token; requeue to first sampled token; order of the scheduler to acknowledgement;
and for each failure the seconds to the next new step and the work that was done again. All processes share this
machine's clock, so the journals' display times can be compared.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

from gyre.ledger import events as ev
from gyre.ledger.job import read_job
from gyre.ledger.layout import RunFolder
from gyre.ledger.shards import TurnReader
from gyre.ledger.turns import Turn
from gyre.ledger.view import LedgerView
from tests.slurm.cluster import ENDLESS, Cluster, Submitted, reached
from tests.slurm.test_failures import guard, host
from tests.tasks import graded_at_random


def turns_of(run: RunFolder) -> list[Turn]:
    return [turn for worker in read_job(run).workers for turn in TurnReader(run, worker).read_all()]


def first_token(run: RunFolder, after: float) -> float:
    """Seconds from `after` to the first token sampled since."""
    return min((turn.first_token for turn in turns_of(run) if turn.first_token > after), default=float("nan")) - after


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


def costs(run: RunFolder) -> Iterator[str]:
    """For each process that was lost, and each attempt after the first: a line on what that cost.

    Seconds are from the loss (of an attempt: from its last line) to the first commit of a step that is new, and, for an
    attempt, to its first sampled token. Sampled tokens are lost when their execution is dispatched again.
    """
    lines = sorted(LedgerView(run, snapshot=False).poll(), key=lambda line: line.t)
    commits = [(line.t, line.event.step) for line in lines if isinstance(line.event, ev.Committed)]
    losses = [
        (line.t, line.event.name) for line in lines if isinstance(line.event, ev.ProcessEnded) and line.event.code
    ]
    for before, line in pairwise(lines):
        if line.writer == "supervisor" and isinstance(line.event, ev.Opened):
            losses.append((before.t, f"attempt {line.incarnation - 1}"))
    ends = [t for t, _ in sorted(losses)[1:]] + [float("inf")]
    for (lost, what), end in zip(sorted(losses), ends, strict=True):
        newest = max((step for t, step in commits if t <= lost), default=0)
        new = min((t for t, step in commits if t > lost and step > newest), default=float("nan"))
        redone = sum(lost < t < new and step <= newest for t, step in commits)
        dispatched = [line.event for line in lines if lost < line.t < end and isinstance(line.event, ev.Dispatched)]
        again = {(d.execution, d.attempt - 1) for event in dispatched for d in event.executions if d.attempt > 1}
        tokens = sum(len(turn.output) for turn in turns_of(run) if (turn.execution, turn.attempt) in again)
        token = f", first token after {first_token(run, lost):.1f} s" if what.startswith("attempt") else ""
        yield (
            f"{what} lost{token}, new step after {new - lost:.1f} s; done again: {redone} steps,"
            f" {len(again)} executions with {tokens} sampled tokens"
        )


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
    for name, fail in failures(run).items():
        newest = reached(run.opened)
        fail()
        run.wait_for(lambda opened, newest=newest: reached(opened) > newest, f"a step after: {name}", ending=True)
        run.wait_for_step()
    run.cancel()
    print("\n".join([f"{len(failures(run))} failures: {', '.join(failures(run))}", *costs(run.opened.run)]))


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
    parser.add_argument("--only", choices=["times", "failures"])
    parser.add_argument("--read", type=Path, nargs="+", help="run folders: only what their failures cost")
    options = parser.parse_args()
    if options.read:
        for folder in options.read:
            print("\n".join([str(folder), *costs(RunFolder(folder))]))
        return
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
            if options.only not in (None, name):
                continue
            (home / name).mkdir()
            measure(Submitted(cluster, home / name, cache, tasks, ENDLESS, *settings))
            cluster.heal()
    finally:
        cluster.call("stop")


if __name__ == "__main__":
    main()
