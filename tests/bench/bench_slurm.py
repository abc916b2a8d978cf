"""A run on the test cluster (`make slurm-up` first): how long Slurm and the ledger take.

    eval "$(slurm/cluster env)"; python tests/bench/bench_slurm.py [--cells 4] [--steps 4]

Prints: submission to first sampled token; requeue to first sampled token; order of the scheduler to acknowledgement.
All processes share this machine's clock, so the journals' display times can be compared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gyre.ledger import events as ev
from gyre.ledger.job import read_job
from gyre.ledger.layout import RunFolder
from gyre.ledger.shards import TurnReader
from gyre.ledger.view import LedgerView

ROOT = Path(__file__).resolve().parents[2]


def gyre(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "gyre.cli.main", *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


def status() -> dict[str, object]:
    found: dict[str, object] = json.loads(gyre("status", "--json"))
    return found


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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cells", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="gyre-bench-"))
    os.environ["GYRE_RUNS"] = str(home)
    settings = ["slurm.cpu.nodes=2", "slurm.cpu.partition=cpu", "slurm.gpu.partition=gpu"]
    settings += [f"cells.count={options.cells}", f"train.steps={options.steps}"]
    began = time.time()
    gyre("submit", "recipes/short.toml", *(f"--set={setting}" for setting in settings))
    run = RunFolder(next(home.iterdir()))
    while len(status()["steps"]) < 1:  # type: ignore[arg-type]
        time.sleep(2)
    requeued = time.time()
    subprocess.run(["scontrol", "requeue", read_job(run).job_ids[-1]], check=True)
    while status()["state"] in ("pending", "running"):
        time.sleep(2)
    view = LedgerView(run)
    view.poll()
    opened = view.state.opened["scheduler"]
    print(f"{run.path}: {status()['state']}, {len(opened)} attempts")
    print(f"submission to first sampled token: {first_token(run, began):.1f} s")
    print(f"requeue to first sampled token: {first_token(run, requeued):.1f} s")
    entered, acknowledged = latencies(run)
    print(f"role order to the cell's answer: {spread(entered)}")
    print(f"new routes to the last acknowledgement: {spread(acknowledged)}")


if __name__ == "__main__":
    main()
