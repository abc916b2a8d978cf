"""Emulation against simulation: real processes with paced engines and trainers, and what the simulator said of them.

    python tests/bench/bench_emulation.py [--factor 15] [--modes elastic,colocate,async] [--set KEY=VALUE] [--keep DIR]
    python tests/bench/bench_emulation.py --read DIR           the runs of an earlier --keep

Two predictions stand next to each mode's time: from its own ledger, and from the ledger of the first mode (what
`gyre simulate RUN --modes ...` says): durations of executions as they were, processes and sandboxes included, training,
switches and the latency of orders. Needs a machine with cores to spare: what waits for a core lasts longer.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import tempfile
import time
from pathlib import Path

from gyre.ledger.layout import RunFolder
from gyre.ledger.state import RunState
from gyre.ledger.view import LedgerView
from gyre.recipe.load import load_recipe
from gyre.simulate.jobs import Recorded
from gyre.simulate.paced.emulate import Emulation, emulate
from gyre.simulate.recorded import measured_seconds, recorded_workload
from gyre.simulate.simulation import Plan, Simulation
from gyre.simulate.workload import load_workload

ROOT = Path(__file__).resolve().parents[2]
MODEL: dict[str, object] = {
    "build": str(ROOT / "recipes" / "tiny_model" / "build.py"),
    "build_arguments": ["--steps", "0"],
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--factor", type=float, default=15.0)
    parser.add_argument("--modes", default="elastic,colocate,async")
    parser.add_argument("--workload", type=Path, default=ROOT / "recipes" / "workloads" / "emulated.toml")
    parser.add_argument("--set", action="append", default=[], help="override a key of the workload")
    parser.add_argument("--split", type=int, default=1, help="cells that train in async")
    parser.add_argument("--keep", type=Path, help="an empty folder for the runs; default: a temporary one")
    parser.add_argument("--read", type=Path, help="emulate nothing, read the runs of this folder")
    options = parser.parse_args()
    modes = options.modes.split(",")
    if options.read is not None:
        for mode in modes:
            show(RunFolder(options.read / "runs" / modes[0]), RunFolder(options.read / "runs" / mode))
        return
    emulation = Emulation(load_workload(options.workload, options.set), options.factor, MODEL)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        os.environ["GYRE_RUNS"] = str(folder / "runs")
        runs: list[RunFolder] = []
        for mode in modes:
            runs.append(emulation.prepare(folder, mode, options.split))
            began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
            asyncio.run(emulate(runs[-1]))
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            show(runs[0], runs[-1])
            print(f"  {time.monotonic() - began:.0f} s with {cpu:.0f} s of CPU at a load of {os.getloadavg()[0]:.1f}")


def show(first: RunFolder, run: RunFolder) -> None:
    state, schedule = state_of(run), load_recipe(run.recipe, folders=False).schedule
    plan, took = Plan(schedule.mode, schedule.training_cells), measured_seconds(state)
    own, other = predict(run, plan), predict(first, plan)
    cells = recorded_workload(state, load_recipe(run.recipe, folders=False), run.name)[0].cells
    print(
        f"{run.name}: {took:.1f} s for {len(state.executions)} executions on {cells.count} cells;"
        f" simulated from its ledger {own:.1f} s ({own / took - 1:+.1%}),"
        f" from that of {first.name} {other:.1f} s ({other / took - 1:+.1%});"
        f" latency {1000 * cells.latency:.0f} ms, a switch {cells.to_training:.1f} s",
        flush=True,
    )


def state_of(run: RunFolder) -> RunState:
    view = LedgerView(run)
    view.poll()
    return view.state


def predict(run: RunFolder, plan: Plan) -> float:
    """Seconds from the opening of the first burst, by what the ledger of `run` says."""
    workload, groups = recorded_workload(state_of(run), load_recipe(run.recipe, folders=False), run.name)
    done = Simulation(workload, Recorded(groups), plan).run()
    return done.seconds - done.state.bursts[1].t


if __name__ == "__main__":
    main()
