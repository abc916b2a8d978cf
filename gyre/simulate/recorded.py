"""A workload read off a run's ledger: durations, training times, switch times, latency.

Owns what is measured and what is taken for granted. Invariant: reading never changes a run. Taken for granted: an
execution takes as long whoever serves it, and a step's training is shared among its executions by the tokens that they
sampled. Evaluations are left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean, median

from gyre.errors import UserError
from gyre.ledger.state import CellIncarnation, RunState, execution_names
from gyre.recipe.schema import Recipe
from gyre.simulate.jobs import Job
from gyre.simulate.workload import Cells, Executions, Group, Schedule, Training, Workload

LEAST_MICROSTEP = 1e-3


def recorded_workload(state: RunState, recipe: Recipe, name: str) -> tuple[Workload, list[list[Job]]]:
    """The workload, and the jobs of each training group in the order of dispatch. Raises UserError for a bare run."""
    steps = state.history()
    groups = [
        group
        for group in sorted(state.groups.values(), key=lambda g: g.order)
        if group.plan.purpose == "train" and group.plan.group in state.consumed
    ]
    if not groups or not steps:
        raise UserError(f"{name} has committed no step yet: there is nothing to go by")
    training = {step: _training_seconds(state, step) for step in steps}
    latency = _latency(state)
    jobs = [_jobs(state, group.plan.group, training, latency) for group in groups]
    seconds = [job.seconds for group in jobs for job in group]
    workload = Workload(
        name=name,
        steps=recipe.train.steps if max(steps) >= recipe.train.steps else max(steps),
        group=Group.of(recipe),
        schedule=Schedule.of(recipe),
        cells=_cells(state, recipe, latency),
        executions=Executions(
            mean=fmean(seconds),
            timeout=2.0 * max(seconds) + 1.0,
            spread_group=0.0,
            spread_execution=0.0,
            timeout_clock="service",
        ),
        training=Training(
            work=sum(training.values()) / max(1, sum(job.graded for group in jobs for job in group)),
            microstep=_microstep(state, training),
            microsteps_per_grant=recipe.train.bundle,
            optimizer=median(commit.seconds for _, commit in steps.values()),
        ),
    )
    return workload, jobs


def measured_seconds(state: RunState) -> float:
    """What the run itself took: from its first burst to its last commit, by display times."""
    ends = [at for lineage in state.lineages.values() for at in lineage.t_committed.values()]
    return max(ends) - state.bursts[min(state.bursts)].t


def _jobs(state: RunState, group: str, training: dict[int, float], latency: float) -> list[Job]:
    """From the opening of its burst to its end: waits for a worker's slot and lost attempts belong to an execution."""
    step = state.consumed[group]
    tokens = sum(outcome.tokens_sampled for name in _groups_of(state, step) for _, outcome in state.graded(name))
    graded = dict(state.graded(group))
    opened = state.bursts[state.groups[group].burst].t
    jobs = []
    for name in execution_names(state.groups[group].plan):
        ends = [a.t_finished for a in state.executions[name].attempts.values() if a.finished is not None]
        outcome = graded.get(name)
        share = outcome.tokens_sampled / tokens if outcome is not None and tokens else 0.0
        jobs.append(
            Job(
                seconds=max(0.0, max(ends, default=opened) - opened - latency),
                work=share * training.get(step, 0.0),
                timed_out=outcome is not None and outcome.timed_out,
                graded=outcome is not None,
            )
        )
    return jobs


def _groups_of(state: RunState, step: int) -> list[str]:
    return [consumed.group for consumed in state.steps[step].consumed if not consumed.void]


def _training_seconds(state: RunState, step: int) -> float:
    """Cell-seconds of a step's micro-steps, each once."""
    seen: set[str] = set()
    seconds = 0.0
    for grant in state.steps[step].grants if step in state.steps else []:
        done = state.cells.get(grant.cell, {}).get(grant.incarnation, CellIncarnation()).done.get(grant.grant)
        if done is not None and not seen & set(done.microsteps):
            seen.update(done.microsteps)
            seconds += done.seconds
    return seconds


def _microstep(state: RunState, training: dict[int, float]) -> float:
    count = sum(len(state.steps[step].microsteps) for step in training if step in state.steps)
    return max(LEAST_MICROSTEP, sum(training.values()) / max(1, count))


def _cells(state: RunState, recipe: Recipe, latency: float) -> Cells:
    spans = [span for found in state.cells.values() for cell in found.values() for span in _spans(cell)]

    def usual(before: str, after: str) -> float:
        return _median(seconds for b, a, seconds in spans if (b, a) == (before, after))

    return Cells(
        count=recipe.cells.count,
        executions_per_cell=recipe.rollout.executions_per_cell,
        to_training=usual("rollout", "training"),
        to_rollout=usual("training", "rollout"),
        refresh=usual("rollout", "rollout"),
        rejoin=usual("training", "training"),
        latency=latency,
    )


def _spans(cell: CellIncarnation) -> Iterable[tuple[str, str, float]]:
    """(role before, role after, seconds between the two): switches, and takes of new weights."""
    role, between = "", 0.0
    for state, seconds, _ in [*cell.history, (cell.state, 0.0, 0.0)]:
        if state in ("rollout", "training"):
            if role and (between or role != state):
                yield role, state, between
            role, between = state, 0.0
        else:
            between += seconds


def _latency(state: RunState) -> float:
    """From a fact to the act that it causes: twice what cells took to begin what they were ordered last.

    A scheduler hears of facts as cells hear of orders, by polling.
    """
    waits = []
    for cell, ordered in state.t_roles.items():
        found = state.cell(cell)
        ends = [t for _, _, t in found.history if t >= ordered] if found is not None else []
        if ends:
            waits.append(min(ends) - ordered)
    return 2.0 * _median(waits)


def _median(values: Iterable[float]) -> float:
    found = list(values)
    return median(found) if found else 0.0
