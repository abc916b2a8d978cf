"""Emulation against simulation: real processes with paced engines and trainers, and what the simulator said of them.

    python tests/bench/bench_emulation.py [--factor 15] [--modes elastic,colocate,async] [--set KEY=VALUE] [--keep DIR]

The simulator is given the latency of orders and what an execution takes over its own time (its processes, its sandbox,
its grading), both measured in the first emulated mode; everything else is the workload's. Needs a machine with cores
to spare: harness processes that wait for a core are measured too.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import tempfile
import time
from pathlib import Path
from statistics import median

import msgspec

from gyre.ledger import events as ev
from gyre.ledger.job import read_job
from gyre.ledger.layout import RunFolder
from gyre.ledger.state import execution_names
from gyre.ledger.tail import JournalTail, Line
from gyre.ledger.view import LedgerView
from gyre.simulate.jobs import Drawn, Job
from gyre.simulate.paced.emulate import TOKENS, Emulation, emulate
from gyre.simulate.recorded import measured_seconds
from gyre.simulate.simulation import Plan, Simulation
from gyre.simulate.workload import Workload, load_workload

ROOT = Path(__file__).resolve().parents[2]
MODEL = {"build": str(ROOT / "recipes" / "tiny_model" / "build.py"), "build_arguments": ["--steps", "0"]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--factor", type=float, default=15.0)
    parser.add_argument("--modes", default="elastic,colocate,async")
    parser.add_argument("--workload", type=Path, default=ROOT / "recipes" / "workloads" / "emulated.toml")
    parser.add_argument("--set", action="append", default=[], help="override a key of the workload")
    parser.add_argument("--split", type=int, default=1, help="cells that train in async")
    parser.add_argument("--keep", type=Path, help="an empty folder for the runs; default: a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        os.environ["GYRE_RUNS"] = str(folder / "runs")
        compare(
            load_workload(options.workload, options.set),
            options.factor,
            options.modes.split(","),
            options.split,
            folder,
        )


def compare(workload: Workload, factor: float, modes: list[str], split: int, folder: Path) -> None:
    emulation = Emulation(workload, factor, MODEL)
    measured: Measured | None = None
    for mode in modes:
        run = emulation.prepare(folder, mode, split)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        asyncio.run(emulate(run))
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        found = Measured(run, emulation)
        measured = measured or found
        predicted = predict(emulation, measured, Plan(mode, split))
        switch = workload.cells.to_training / factor
        print(
            f"{mode}: {found.seconds:.1f} s emulated, {predicted:.1f} s simulated"
            f" ({predicted / found.seconds - 1:+.1%}); latency {1000 * found.latency:.0f} ms, scaled switch"
            f" {switch:.2f} s ({switch / found.latency:.0f} latencies), overhead {found.overhead:.2f} s an execution,"
            f" {found.executions} executions, {cpu:.0f} s of CPU, load {os.getloadavg()[0]:.1f}",
            flush=True,
        )


class Measured:
    """What the simulator is told of an emulated run, and how long that took."""

    def __init__(self, run: RunFolder, emulation: Emulation) -> None:
        view = LedgerView(run)
        view.poll()
        state = view.state
        self.seconds = measured_seconds(state)
        self.executions = len(state.executions)
        lines = [line for line in JournalTail(run, read_job(run).writers()).poll() if line.t]
        self.latency = order_latency(lines)
        names = {f"paced-{n:04d}": n for n in range(emulation.workload.groups)}
        jobs = Drawn(emulation.workload, emulation.seed)
        took, needed = 0.0, 0.0
        for group in state.groups.values():
            executions = [state.executions[name] for name in execution_names(group.plan)]
            took += sum(a.finished.seconds for e in executions for a in e.attempts.values() if a.finished is not None)
            needed += sum(job.seconds for job in jobs.group(names[group.plan.task])) / emulation.factor
        self.overhead = (took - needed) / self.executions
        self.order = [names[group.plan.task] for group in sorted(state.groups.values(), key=lambda g: g.order)]
        tokens = sum(found.packed.tokens_trained for found in state.steps.values() if found.packed is not None)
        self.tokens = tokens / self.executions
        self.microsteps = sum(len(found.microsteps) for found in state.steps.values())


def order_latency(lines: list[Line]) -> float:
    """From a fact to the act that it causes: a commit to the order that follows, and an order to what its cell says."""
    lines = sorted(lines, key=lambda line: line.t)
    heard, obeyed = [], []
    for index, line in enumerate(lines):
        if isinstance(line.event, ev.Committed):
            heard += [x.t - line.t for x in lines[index + 1 : index + 60] if x.writer == "scheduler"][:1]
        elif isinstance(line.event, ev.TrainOrdered | ev.ServeOrdered):
            obeyed += [x.t - line.t for x in lines[index + 1 : index + 200] if x.writer == line.event.cell][:1]
    return median(heard) + median(obeyed)


class Given:
    """The workload's executions in the run's order of groups, each with what processes take besides."""

    def __init__(self, emulation: Emulation, measured: Measured) -> None:
        jobs = Drawn(emulation.workload, emulation.seed)
        work = emulation.workload.training.work / TOKENS * measured.tokens / emulation.factor
        self._groups = [
            [Job(job.seconds / emulation.factor + measured.overhead, work) for job in jobs.group(number)]
            for number in measured.order
        ]

    def group(self, number: int) -> list[Job]:
        return self._groups[number]


def predict(emulation: Emulation, measured: Measured, plan: Plan) -> float:
    """Seconds, from the opening of the first burst."""
    workload, factor = emulation.workload, emulation.factor
    cells, training = workload.cells, workload.training
    jobs = Given(emulation, measured)
    work = sum(job.work for number in range(workload.groups) for job in jobs.group(number))
    scaled = msgspec.structs.replace(
        workload,
        cells=msgspec.structs.replace(
            cells,
            to_training=cells.to_training / factor,
            to_rollout=cells.to_rollout / factor,
            refresh=cells.refresh / factor,
            latency=measured.latency,
        ),
        executions=msgspec.structs.replace(workload.executions, timeout_clock="service"),
        training=msgspec.structs.replace(
            training,
            microstep=work / measured.microsteps,
            optimizer=training.optimizer / factor,
            merge=training.merge / factor,
        ),
    )
    done = Simulation(scaled, jobs, plan).run()
    return done.seconds - done.state.bursts[1].t


if __name__ == "__main__":
    began = time.monotonic()
    main()
    print(f"{time.monotonic() - began:.0f} s")
