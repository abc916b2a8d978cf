"""How long the scheduler thinks.

    python tests/bench/bench_decide.py             a call of `decide()`, and of the Decider that the daemon asks
    python tests/bench/bench_decide.py --scale     the daemon's ticks over a ledger of 10,000 executions

The first: late in a long run, 10,000 groups behind it, and a burst under way. The second: the lines of a simulated run
on 48 cells (its executions would make 3,000,000 calls, of which no journal speaks) are written to real journals, tick
by tick; each tick polls, folds and decides as `processes/scheduler.py` does, and has to give the simulation's orders.
Ticks are those in which the scheduler has something to say; in the others every decision is passed over.
"""

from __future__ import annotations

import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median

import msgspec
from bench_status import CELLS, GROUPS, Said, burst, history, training

from gyre.ledger import events as ev
from gyre.ledger.fold import fold
from gyre.ledger.job import Job, write_job
from gyre.ledger.journal import create_index, encode_line
from gyre.ledger.layout import RunFolder
from gyre.ledger.state import RunState
from gyre.ledger.tail import Line
from gyre.ledger.view import LedgerView
from gyre.scheduling.decide import decide
from gyre.scheduling.decider import Decider
from gyre.scheduling.facts import World
from gyre.scheduling.settings import Settings
from gyre.simulate.jobs import Drawn
from gyre.simulate.simulation import Plan, Simulation
from gyre.simulate.workload import load_workload

ROOT = Path(__file__).resolve().parents[2]
STEPS = 10_000 // GROUPS
CALLS = 200

SETTINGS = Settings(
    seed=1,
    mode="elastic",
    executions=16,
    groups_per_step=GROUPS,
    min_graded=2,
    steps=10 * STEPS,
    steps_per_burst=1,
    lead_steps=0,
    max_overtake=64,
    cell_room=128,
    training_cells=1,
    cells=CELLS,
    workers=("worker-0",),
    attempts=3,
    microsteps_per_grant=1,
    checkpoint_every=1,
    phase_timeout=600.0,
    tasks=tuple(f"task-{i}" for i in range(100)),
)


class Teller:
    def __init__(self) -> None:
        self.state = RunState()
        self.numbers: dict[str, int] = {}

    def tell(self, said: Iterable[Said]) -> None:
        for writer, event in said:
            n = self.numbers[writer] = self.numbers.get(writer, -1) + 1
            fold(self.state, Line(writer, 1, n, 1.0, event))

    def time(self, what: str) -> None:
        """Orders are folded until there are none; then each call says nothing, as most do."""
        while orders := decide(World(self.state, SETTINGS)):
            self.tell(("scheduler", order) for order in orders)
        plain = timed(lambda: decide(World(self.state, SETTINGS)))
        decider = Decider(self.state, SETTINGS)
        decider.decide()

        def tick() -> None:
            decider.look(frozenset(), {})
            decider.decide()

        print(
            f"{what}: {1000 * plain:.3f} ms a call, {1000 * timed(tick):.3f} ms by the Decider,"
            f" {len(self.state.groups)} groups, w = {self.state.waterlevel}"
        )


def timed(act: Callable[[], object]) -> float:
    began = time.process_time()
    for _ in range(CALLS):
        act()
    return (time.process_time() - began) / CALLS


SCALE = [
    "steps=5",
    "group.groups_per_step=125",
    "schedule.steps_per_burst=5",
    "cells.count=48",
    "cells.executions_per_cell=209",
    "training.microstep=240",
]


def at_scale() -> None:
    workload = load_workload(ROOT / "recipes" / "workloads" / "repo-122b.toml", SCALE)
    done = Simulation(workload, Drawn(workload, 0), Plan("elastic"), keep=True).run()
    with tempfile.TemporaryDirectory() as folder:
        replay(RunFolder(Path(folder) / "run").create(), done)


def replay(run: RunFolder, done: Simulation) -> None:
    """The simulated lines through real journals; between two of the scheduler's it polls and decides."""
    cells = list(done.settings.cells)
    job = Job(
        launcher="local",
        code="0",
        created=1.0,
        model="/model",
        workers=["worker-0"],
        cells=cells,
        tasks=list(done.settings.tasks),
        eval_tasks=[],
    )
    write_job(run, job)
    files = {}
    for writer in job.writers():
        create_index(run, writer)
        run.index_path(writer).write_text(f"{writer}.1.jsonl\n")
        files[writer] = open(run.journal_path(writer, 1), "wb")  # noqa: SIM115
    view, encoder = LedgerView(run, snapshot=False), msgspec.json.Encoder()
    decider = Decider(view.state, done.settings)
    thought: list[float] = []
    polled: list[float] = []
    orders: list[ev.Event] = []
    pending = False
    for line in done.lines or []:
        if line.writer == "scheduler" and line.n > 1:
            if pending:
                began = time.process_time()
                lines = view.poll()
                polled.append(time.process_time() - began)
                for each in lines:
                    decider.folded(each.writer, each.event)
                thought.append(0.0)
                pending = False
            if not orders:
                began = time.process_time()
                decider.look(frozenset(), {})
                orders = list(decider.decide())
                thought[-1] += time.process_time() - began
            assert orders.pop(0) == line.event, "another order than the simulation's"
            fold(view.state, line)
            decider.folded("scheduler", line.event)
        else:
            pending = True
        files[line.writer].write(encode_line(line.n, line.t, encoder.encode(line.event)))
        files[line.writer].flush()
    for file in files.values():
        file.close()
    size = sum(run.journal_path(writer, 1).stat().st_size for writer in job.writers())
    tracemalloc.start()
    alone = LedgerView(run, snapshot=False)
    alone.poll()
    state = tracemalloc.get_traced_memory()[0]
    assert alone.state == view.state
    for what, times in (("decisions", thought), ("poll and fold", polled)):
        times.sort()
        print(
            f"{what}: {1000 * median(times):.2f} ms a tick (median of {len(times)}),"
            f" 99 % within {1000 * times[len(times) * 99 // 100]:.2f} ms, {1000 * times[-1]:.1f} ms at most"
        )
    print(
        f"{len(done.lines or [])} lines, {size / 1e6:.1f} MB of journals,"
        f" folded state {state / 1e6:.0f} MB, {len(view.state.executions)} executions on {len(cells)} cells"
    )


def main() -> None:
    if "--scale" in sys.argv:
        at_scale()
        return
    teller = Teller()
    teller.tell(history(STEPS))
    teller.time("burst just opened")
    step = STEPS + 1
    rest = [(writer, event) for writer, event in burst(step) if writer == "worker-0"]
    teller.tell(rest[: len(rest) * 3 // 4])
    teller.time("half of the executions have ended")
    teller.tell(rest[len(rest) * 3 // 4 :])
    teller.tell((w, e) for w, e in training(step) if w == "processor")
    teller.tell(("worker-0", ev.RoutesAcknowledged(epoch=1, n=n)) for n in [teller.state.routed[1]])
    teller.time("all have ended, the core is ordered to train")


if __name__ == "__main__":
    main()
