"""Modes, cell counts and seeds compared on the same executions.

Owns the results' shape: that of `gyre simulate --json`. Invariants: every row of a study was given the same jobs, seed
by seed; async is shown at the split that is best for it, with and without streaming; a row whose trained work differs
from elastic's by more than `WORK_TOLERANCE` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import msgspec
from msgspec import Struct

from gyre.errors import UserError
from gyre.simulate.bound import bound
from gyre.simulate.jobs import Drawn, Jobs
from gyre.simulate.simulation import Plan, Simulation
from gyre.simulate.workload import Workload

WORK_TOLERANCE = 0.005
HOUR = 3600.0
PROBING = "elastic-probe"
"""Elastic, with the rule `probe` of policies.py for who starts first."""
NEAR = 1.03
"""Splits of async whose first try is within this of the best are tried on all seeds."""

JobsOf = Callable[[Workload, int], Jobs]
"""The jobs of a seed."""


class Trial(Struct, frozen=True, kw_only=True):
    """One simulated run."""

    seconds: float
    idle_share: float
    staleness_max: int
    staleness_mean: float
    lag_max: int
    lag_mean: float
    executions: int
    timed_out: int
    work: float
    """cell-seconds of training"""
    lost_work: float
    """cell-seconds of training that deadlines cut off, of executions that would have ended in time alone"""
    training: float
    serving: float
    switching: float
    """shares of all cell-time: in training, in rollout, in between"""
    events: int


class Row(Struct, frozen=True, kw_only=True):
    """A mode at a cell count, over all seeds: medians, but for extremes. `speedup`: its hours over elastic's."""

    mode: str
    cells: int
    training_cells: int
    """async: the split; else 0"""
    streaming: bool
    hours: float
    hours_min: float
    hours_max: float
    speedup: float
    """how much faster elastic is, seed by seed"""
    over_bound: float
    idle_share: float
    staleness_max: int
    staleness_mean: float
    lag_max: int
    lag_mean: float
    timed_out_share: float
    lost_work_share: float
    work_difference: float
    """trained work against elastic's, relative: comparisons beyond 0.005 do not hold"""
    training_share: float
    serving_share: float
    switching_share: float


class Study(Struct, frozen=True, kw_only=True):
    workload: str
    steps: int
    seeds: int
    modes: list[Row]
    bound_hours: float
    bounds: dict[str, float]
    """cell count -> hours"""


@dataclass(frozen=True)
class Measured:
    plan: Plan
    trials: list[Trial]

    @property
    def seconds(self) -> float:
        return median(trial.seconds for trial in self.trials)


def drawn(workload: Workload, seed: int) -> Jobs:
    return Drawn(workload, seed)


def trial(workload: Workload, jobs: Jobs, plan: Plan, seed: int) -> Trial:
    """Simulate one run."""
    done = Simulation(workload, jobs, plan, seed).run()
    cells, seconds = workload.cells, done.seconds
    total = cells.count * seconds
    optimizing = sum(cell.optimizing for cell in done.cells.values())
    useful = done.rollout.served / cells.executions_per_cell + done.packing.total + optimizing
    in_state = {"training": 0.0, "rollout": 0.0}
    for cell in done.cells.values():
        for state, began, ended in [*cell.states, (cell.state, cell.since, seconds)]:
            if state in in_state:
                in_state[state] += max(0.0, min(ended, seconds) - began)
    return Trial(
        seconds=seconds,
        idle_share=1.0 - useful / total,
        staleness_max=max(done.staleness, default=0),
        staleness_mean=fmean(done.staleness) if done.staleness else 0.0,
        lag_max=max(done.lag, default=0),
        lag_mean=fmean(done.lag) if done.lag else 0.0,
        executions=done.executions,
        timed_out=done.timed_out,
        work=done.packing.total,
        lost_work=done.lost_work,
        training=in_state["training"] / total,
        serving=in_state["rollout"] / total,
        switching=1.0 - sum(in_state.values()) / total,
        events=done.events,
    )


def study(
    workload: Workload,
    modes: Sequence[str],
    cells: Sequence[int],
    seeds: int,
    jobs_of: JobsOf = drawn,
    report: Callable[[str], None] = lambda line: None,
) -> Study:
    """All rows. `report` hears what is under way."""
    rows: list[Row] = []
    bounds: dict[str, float] = {}
    for count in cells or [workload.cells.count]:
        sized = msgspec.structs.replace(workload, cells=msgspec.structs.replace(workload.cells, count=count))
        jobs = [jobs_of(sized, seed) for seed in range(seeds)]
        least = [bound(sized, each).seconds for each in jobs]
        bounds[str(count)] = median(least) / HOUR
        measured: list[Measured] = []
        if count < 2 and set(modes) == {"async"}:
            raise UserError("async needs two cells or more: one trains, one serves")
        for mode in modes:
            report(f"{sized.name}: {mode}, {count} cells")
            measured += _mode(sized, mode, jobs)
        base = next((m for m in measured if m.plan == Plan("elastic")), measured[0])
        rows += [_row(each, base, count, least) for each in measured]
    return Study(
        workload=workload.name,
        steps=workload.steps,
        seeds=seeds,
        modes=rows,
        bound_hours=next(iter(bounds.values())),
        bounds=bounds,
    )


def _mode(workload: Workload, mode: str, jobs: Sequence[Jobs]) -> list[Measured]:
    if mode == PROBING:
        return [measure(workload, Plan("elastic", probing=True), jobs)]
    if mode != "async":
        return [measure(workload, Plan(mode), jobs)]
    if workload.cells.count < 2:
        return []
    return [best_split(workload, streaming, jobs) for streaming in (True, False)]


def measure(workload: Workload, plan: Plan, jobs: Sequence[Jobs]) -> Measured:
    return Measured(plan, [trial(workload, each, plan, seed) for seed, each in enumerate(jobs)])


def best_split(workload: Workload, streaming: bool, jobs: Sequence[Jobs]) -> Measured:
    """Async at its best: downhill from the middle on the start of the first seed, then all that come near it on all."""
    start = msgspec.structs.replace(workload, steps=min(workload.steps, 3 * workload.schedule.steps_per_burst))
    known: dict[int, float] = {}

    def seconds(split: int) -> float:
        if split not in known:
            known[split] = trial(start, jobs[0], Plan("async", split, streaming), 0).seconds
        return known[split]

    def around(split: int) -> list[int]:
        return [near for near in (split - 1, split, split + 1) if 0 < near < workload.cells.count]

    best = workload.cells.count // 2
    while (better := min(around(best), key=seconds)) != best:
        best = better
    plans = [Plan("async", split, streaming) for split in around(best) if known[split] < NEAR * known[best]]
    return min((measure(workload, plan, jobs) for plan in plans), key=lambda m: m.seconds)


def plan_of(row: Row) -> Plan:
    """What a row was simulated with."""
    if row.mode == PROBING:
        return Plan("elastic", probing=True)
    return Plan(row.mode, max(1, row.training_cells), row.streaming)


def _row(measured: Measured, base: Measured, cells: int, least: Sequence[float]) -> Row:
    trials, plan = measured.trials, measured.plan
    hours = [t.seconds / HOUR for t in trials]
    return Row(
        mode=PROBING if plan.probing else plan.mode,
        cells=cells,
        training_cells=plan.split if plan.mode == "async" else 0,
        streaming=plan.streaming,
        hours=median(hours),
        hours_min=min(hours),
        hours_max=max(hours),
        speedup=median(t.seconds / b.seconds for t, b in zip(trials, base.trials, strict=True)),
        over_bound=median(t.seconds / b for t, b in zip(trials, least, strict=True)),
        idle_share=median(t.idle_share for t in trials),
        staleness_max=max(t.staleness_max for t in trials),
        staleness_mean=fmean(t.staleness_mean for t in trials),
        lag_max=max(t.lag_max for t in trials),
        lag_mean=fmean(t.lag_mean for t in trials),
        timed_out_share=sum(t.timed_out for t in trials) / max(1, sum(t.executions for t in trials)),
        lost_work_share=fmean(t.lost_work / (t.work + t.lost_work) if t.work else 0.0 for t in trials),
        work_difference=sum(t.work for t in trials) / max(1e-9, sum(t.work for t in base.trials)) - 1.0,
        training_share=median(t.training for t in trials),
        serving_share=median(t.serving for t in trials),
        switching_share=median(t.switching for t in trials),
    )
