"""The facts of a run, gathered for people and scripts: the one source of status, progress and report.

Owns the shape of `gyre status --json`. Invariant: everything here follows from the folded state; nothing is measured or
decided. Times are seconds; dates are seconds since the epoch.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from gyre.ledger.state import CellIncarnation, RunState
from gyre.ledger.training_stats import LengthDifference, alarm, differences, training_stats
from gyre.recipe.schema import Recipe
from gyre.scheduling.settings import settings_of
from gyre.views.evaluation import evaluate
from gyre.views.switches import Switch, switches_of

State = Literal["pending", "running", "finished", "failed", "cancelled"]

ROLES: dict[str, Literal["rollout", "training", ""]] = {
    "starting": "",
    "ready": "",
    "failed": "",
    "rollout": "rollout",
    "draining": "training",
    "releasing": "training",
    "joining": "training",
    "training": "training",
    "leaving": "rollout",
    "resuming": "rollout",
}
"""state of a cell -> its role, or the one that it is on its way to"""


class StepSummary(Struct, frozen=True, kw_only=True):
    """One step that stands. `staleness` is the maximum over its groups, in versions; `lag` in optimizer steps.

    `logprob_difference` is the largest |recomputed - recorded| over the step's targets.
    """

    step: int
    version: int
    lineage: int
    reward: float | None
    seconds: float
    executions: int
    staleness: int
    staleness_mean: float
    lag: int
    lag_mean: float
    tokens_sampled: int
    tokens_trained: int
    tokens_dropped: int
    dropped: dict[str, int]
    """tokens_dropped by reason"""
    duration_mean: float
    gradient_norm: float
    learning_rate: float
    ratio: float
    clip_fraction: float
    entropy: float
    logprob_difference: float
    differences: list[LengthDifference]
    """Trainer against engine under equal weights, by the number of targets of a sample."""
    alarm: str
    """Why the clip is too narrow for those differences, or empty."""
    checkpointed: bool
    skipped: bool


class CellSummary(Struct, frozen=True, kw_only=True):
    name: str
    kind: Literal["core", "satellite"]
    role: Literal["rollout", "training", ""]
    """What it does, or is on its way to; empty while it starts."""
    state: str
    since: float
    """When it entered `state`."""
    incarnation: int
    weight_version: str
    shares: dict[str, float]
    """Share of its time that the cell spent in each state, over all incarnations."""
    switches: list[Switch]


class EvalSummary(Struct, frozen=True, kw_only=True):
    burst: int
    version: int
    score: float
    executions: int


class Summary(Struct, frozen=True, kw_only=True):
    name: str
    path: str
    state: State
    reason: str
    started: float
    updated: float
    steps_planned: int
    steps: list[StepSummary]
    evals: list[EvalSummary]
    cells: list[CellSummary]
    waterlevel: int
    burst: int
    executions_graded: int
    executions_excluded: int
    attempts_ended: dict[str, int]
    """reason -> how many attempts ended for it: the outcome table's counters."""
    tokens_sampled: int
    tokens_per_second: float
    restarts: int
    """Incarnations of all processes beyond their first."""
    set_aside: dict[str, str]
    """Tasks that kept failing and are not dispatched any more, each with why."""


def summarise(state: RunState, recipe: Recipe, name: str = "", path: str = "", alive: bool = True) -> Summary:
    """`alive`: is somebody keeping the run going? A run that nobody ended and nobody keeps has failed."""
    verdict, reason = _verdict(state, alive)
    sampled = state.tally.tokens_sampled
    elapsed = state.t_last - state.t_first
    return Summary(
        name=name,
        path=path,
        state=verdict,
        reason=reason,
        started=state.t_first,
        updated=state.t_last,
        steps_planned=recipe.train.steps,
        steps=step_summaries(state, recipe.objective.clip),
        evals=_evals(state),
        cells=[_cell(state, name) for name in _cell_names(state, recipe)],
        waterlevel=state.waterlevel,
        burst=max(state.bursts, default=0),
        executions_graded=state.tally.graded,
        executions_excluded=state.tally.excluded,
        attempts_ended=dict(sorted(state.tally.ends.items())),
        tokens_sampled=sampled,
        tokens_per_second=sampled / elapsed if elapsed > 0 else 0.0,
        restarts=sum(
            len(found) - 1 for writer, found in state.opened.items() if writer not in ("control", "supervisor")
        ),
        set_aside=dict(state.set_aside),
    )


def _verdict(state: RunState, alive: bool) -> tuple[State, str]:
    if state.ended is not None:
        return state.ended.state, state.ended.reason
    if state.failure is not None:
        return "failed", state.failure
    if not alive:
        return "failed", "nobody keeps it going; gyre resume goes on"
    return ("running", "") if "scheduler" in state.opened else ("pending", "")


def step_summaries(state: RunState, clip: tuple[float, float]) -> list[StepSummary]:
    """The steps that stand. A step whose commit was lost with its core, but whose checkpoint was kept, stands too."""
    history = state.history()
    opened = {lineage.opened.step: (number, lineage) for number, lineage in state.lineages.items()}
    found = []
    before = state.bursts[1].t if 1 in state.bursts else state.t_first
    last = max([*history, *opened], default=0)
    for step in range(1, last + 1):
        if step in history:
            number, commit = history[step]
            t = state.lineages[number].t_committed[step]
            made = (commit.version, commit.gradient_norm, commit.learning_rate, commit.checkpointed, commit.skipped)
        elif step in opened:
            number, lineage = opened[step]
            t, made = lineage.t, (lineage.opened.version, 0.0, 0.0, True, False)
        else:
            continue
        found.append(_step(state, clip, step, number, t - before, *made))
        before = t
    return found


def _step(
    state: RunState,
    clip: tuple[float, float],
    step: int,
    lineage: int,
    seconds: float,
    version: int,
    norm: float,
    rate: float,
    checkpointed: bool,
    skipped: bool,
) -> StepSummary:
    packed = state.steps[step].packed if step in state.steps else None
    stats = training_stats(state, step, lineage)
    units, targets = stats.get("units", 0.0), stats.get("targets", 0.0)
    return StepSummary(
        step=step,
        version=version,
        lineage=lineage,
        reward=packed.reward if packed else None,
        seconds=seconds,
        executions=packed.executions if packed else 0,
        staleness=packed.staleness_max if packed else 0,
        staleness_mean=packed.staleness_mean if packed else 0.0,
        lag=packed.lag_max if packed else 0,
        lag_mean=packed.lag_mean if packed else 0.0,
        tokens_sampled=packed.tokens_sampled if packed else 0,
        tokens_trained=packed.tokens_trained if packed else 0,
        tokens_dropped=sum(packed.tokens_dropped.values()) if packed else 0,
        dropped=packed.tokens_dropped if packed else {},
        duration_mean=packed.seconds_mean if packed else 0.0,
        gradient_norm=norm,
        learning_rate=rate,
        ratio=stats.get("ratio_total", 0.0) / units if units else 1.0,
        clip_fraction=stats.get("clipped", 0.0) / units if units else 0.0,
        entropy=stats.get("entropy_total", 0.0) / targets if targets else 0.0,
        logprob_difference=stats.get("difference_max", 0.0),
        differences=differences(stats),
        alarm=alarm(differences(stats), clip),
        checkpointed=checkpointed,
        skipped=skipped,
    )


def _evals(state: RunState) -> list[EvalSummary]:
    found = []
    for number, burst in sorted(state.bursts.items()):
        groups = [g for g in burst.groups if state.groups[g].plan.purpose == "eval"]
        made = evaluate(state, number)
        if made.reward is not None and all(state.group_terminal(g) for g in groups):
            found.append(EvalSummary(burst=number, version=made.version, score=made.reward, executions=made.executions))
    return found


def _cell_names(state: RunState, recipe: Recipe) -> list[str]:
    """The recipe's cells, and the guests that have joined."""
    own = settings_of(recipe, (), (), ()).cells
    guests = sorted((name for name in state.cells if name not in own), key=lambda name: (len(name), name))
    return [*own, *guests]


def _cell(state: RunState, name: str) -> CellSummary:
    incarnations = state.cells.get(name, {})
    newest = max(incarnations, default=0)
    found = incarnations.get(newest, CellIncarnation())
    seconds: dict[str, float] = {}
    switches: list[Switch] = []
    for number, incarnation in sorted(incarnations.items()):
        switches += switches_of(incarnation, number)
        for what, lasted, _ in incarnation.history:
            seconds[what] = seconds.get(what, 0.0) + lasted
    total = sum(seconds.values())
    reign = state.reign()
    return CellSummary(
        name=name,
        kind="core" if reign is not None and reign.cell == name else "satellite",
        role=ROLES[found.state],
        state=found.state,
        since=found.t,
        incarnation=newest,
        weight_version=found.serving.weight_version if found.serving is not None else "",
        shares={what: value / total for what, value in sorted(seconds.items())} if total else {},
        switches=switches,
    )
