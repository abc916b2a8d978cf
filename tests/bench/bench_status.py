"""How long people wait for `gyre status` on a long run, and for `gyre --help`.

Builds a run of about a million journal lines with its snapshot in a temporary folder, and times the commands in
processes of their own. Run it: python tests/bench/bench_status.py [STEPS]
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from gyre.ledger import events as ev
from gyre.ledger.job import Job, write_job
from gyre.ledger.journal import create_index, encode_line
from gyre.ledger.layout import RunFolder
from gyre.ledger.state import execution_names
from gyre.ledger.view import LedgerView
from gyre.recipe.load import dump_toml
from gyre.recipe.schema import Cells, Harness, Model, Recipe, Rollout, Sandbox, Tasks, Train

STEPS = 1880
GROUPS, EXECUTIONS, MICROSTEPS = 16, 16, 16
CELLS = ("cell-0", "cell-1")
REPEATS = 5

Said = tuple[str, ev.Event]
OPENED = ev.Opened(pid=1, pid_start=1.0, host="bench", code="0")
STATES: tuple[ev.CellState, ...] = ("draining", "releasing", "joining", "training", "leaving", "resuming", "rollout")


def history(steps: int) -> Iterator[Said]:
    """What the processes of a quiet run say, in one order that could have been."""
    for writer in ("scheduler", "processor", "worker-0", *CELLS):
        yield writer, OPENED
    for writer in ("scheduler", "processor", "worker-0", *CELLS):
        yield "scheduler", ev.Accepted(writer=writer, incarnation=1)
    yield "scheduler", ev.LineageOrdered(cell="cell-0", incarnation=1, lineage=1)
    yield "cell-0", ev.LineageOpened(lineage=1, step=0, version=0, weight_version="1.0-0", manifest="m0")
    yield "worker-0", ev.WorkerReady(slots=512)
    for step in range(1, steps + 1):
        yield from burst(step)
        yield from training(step)


def burst(step: int) -> Iterator[Said]:
    plans = [ev.GroupPlan(f"g{(step - 1) * GROUPS + i:05d}", f"task-{i}", EXECUTIONS) for i in range(GROUPS)]
    names = [(plan, name) for plan in plans for name in execution_names(plan)]
    yield "scheduler", ev.BurstOpened(burst=step, lineage=1, version=step - 1, groups=plans)
    dispatches = [ev.Dispatch(name, 1, plan.task) for plan, name in names]
    yield "scheduler", ev.Dispatched(worker="worker-0", incarnation=1, executions=dispatches)
    yield "scheduler", ev.Routed(routes={name: CELLS[i % 2] for i, (_, name) in enumerate(names)})
    for _, name in names:
        yield "worker-0", ev.Started(execution=name, attempt=1)
    for i, (_, name) in enumerate(names):
        yield (
            "worker-0",
            ev.Finished(
                execution=name,
                attempt=1,
                outcome="graded",
                reason="ended",
                reward=float(i % 2),
                turns=20,
                tokens_sampled=2000,
                seconds=60.0,
                phases={"prepare": 0.5, "run": 50.0, "grade": 2.5},
            ),
        )
    for plan in plans:
        yield "scheduler", ev.Consumed(step=step, group=plan.group)
    yield "scheduler", ev.StepFilled(step=step)


def training(step: int) -> Iterator[Said]:
    microsteps = [f"step-{step:06d}/1-{i:05d}" for i in range(MICROSTEPS)]
    for name in microsteps:
        yield (
            "processor",
            ev.MicroStepReady(step=step, microstep=name, digest="0" * 32, tokens=9000, targets=3000, samples=8),
        )
    yield (
        "processor",
        ev.Packed(
            step=step,
            microsteps=microsteps,
            executions=GROUPS * EXECUTIONS,
            tokens_sampled=512000,
            tokens_trained=500000,
            tokens_dropped={"auxiliary": 12000},
            reward=0.5,
        ),
    )
    manifest = f"m{step - 1}"
    for cell in CELLS:
        yield "scheduler", ev.TrainOrdered(cell=cell, incarnation=1, lineage=1, step=step, manifest=manifest)
        for state in STATES[:4]:
            at = (1, step) if state == "training" else (0, 0)
            yield cell, ev.CellEntered(state=state, seconds=1.0, lineage=at[0], step=at[1])
    for i, name in enumerate(microsteps):
        cell, grant = CELLS[i % 2], (step - 1) * MICROSTEPS + i + 1
        about = {"grant": grant, "lineage": 1, "step": step, "microsteps": [name]}
        yield "scheduler", ev.Granted(cell=cell, incarnation=1, **about)
        stats = {"units": 8.0, "targets": 3000.0, "clipped": 1.0, "ratio_total": 8.0, "entropy_total": 900.0}
        yield cell, ev.Done(seconds=2.0, tokens=9000, stats={**stats, "difference_max": 0.01}, **about)
    about = {"lineage": 1, "step": step, "number": step, "microsteps": microsteps[1::2]}
    yield "scheduler", ev.OfferOrdered(cell="cell-1", incarnation=1, lineage=1, step=step)
    yield "cell-1", ev.Offered(manifest="g", **about)
    source = {"source": "cell-1", "source_incarnation": 1}
    yield "scheduler", ev.MergeOrdered(cell="cell-0", incarnation=1, manifest="g", **source, **about)
    yield "cell-0", ev.Merged(**source, **about)
    done = {"lineage": 1, "step": step, "version": step}
    yield (
        "scheduler",
        ev.CommitOrdered(
            cell="cell-0",
            incarnation=1,
            executions=GROUPS * EXECUTIONS,
            microsteps=microsteps,
            checkpoint=True,
            **done,
        ),
    )
    yield "cell-0", ev.Committed(weight_version=f"1.{step}-0", manifest=f"m{step}", checkpointed=True, **done)
    for cell in reversed(CELLS):
        serve = {"weight_version": f"1.{step}-0", "manifest": f"m{step}", **done}
        yield "scheduler", ev.ServeOrdered(cell=cell, incarnation=1, **serve)
        for state in STATES[4:]:
            yield cell, ev.CellEntered(state=state, seconds=1.0)
        yield cell, ev.Serving(lineage=1, version=step, weight_version=f"1.{step}-0")


def build(path: Path, steps: int) -> tuple[RunFolder, int]:
    """The run's folder without a snapshot, and how many lines its journals have."""
    run = RunFolder(path).create()
    recipe = Recipe(
        name="bench",
        model=Model(path="/model"),
        tasks=Tasks(path="/tasks"),
        harness=Harness(name="shell"),
        train=Train(steps=steps),
        sandbox=Sandbox(per_node=256),
        rollout=Rollout(executions_per_cell=256),
        cells=Cells(count=2, gpus_per_node=0),
    )
    run.recipe.write_text(dump_toml(recipe))
    job = Job(
        launcher="local",
        code="0",
        created=1.0,
        model="/model",
        workers=["worker-0"],
        cells=list(CELLS),
        tasks=[f"task-{i}" for i in range(GROUPS)],
        eval_tasks=[],
    )
    write_job(run, job)
    for writer in job.writers():
        create_index(run, writer)
    encoder = msgspec.json.Encoder()
    files = {}
    numbers: dict[str, int] = {}
    for count, (writer, event) in enumerate(history(steps)):
        if writer not in files:
            run.index_path(writer).write_text(f"{writer}.1.jsonl\n")
            files[writer] = open(run.journal_path(writer, 1), "wb", buffering=1 << 20)  # noqa: SIM115
        n = numbers[writer] = numbers.get(writer, -1) + 1
        files[writer].write(encode_line(n, 1000.0 + count * 0.1, encoder.encode(event)))
    for file in files.values():
        file.close()
    return run, sum(numbers.values()) + len(numbers)


def cpu_seconds(*command: str, home: Path) -> float:
    """User and system time of one process that must succeed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "GYRE_RUNS": str(home)})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else STEPS
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        run, lines = build(home / "long", steps)
        began = time.process_time()
        view = LedgerView(run, snapshot=False)
        view.poll()
        folded = time.process_time() - began
        print(f"{lines} lines read and folded in {folded:.1f} s of CPU: {lines / folded:.0f} lines/s")
        began = time.process_time()
        view.save()
        print(f"snapshot of {run.snapshot.stat().st_size / 1e6:.0f} MB: {time.process_time() - began:.2f} s to write")
        began = time.process_time()
        view.save()
        print(f"snapshot written again: {time.process_time() - began:.2f} s")
        del view
        began = time.process_time()
        LedgerView(run).poll()
        print(f"snapshot loaded in {time.process_time() - began:.2f} s")
        gyre = [sys.executable, "-m", "gyre.cli.main"]
        for what, arguments in (
            ("gyre status", ["status", "long"]),
            ("gyre status --json", ["status", "long", "--json"]),
            ("gyre --help", ["--help"]),
        ):
            took = [cpu_seconds(*gyre, *arguments, home=home) for _ in range(REPEATS)]
            print(f"{what}: {statistics.median(took):.2f} s of CPU (median of {REPEATS})")


if __name__ == "__main__":
    main()
