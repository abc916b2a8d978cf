"""The shape that scripts rely on, and the facts behind it, on a hand-made history of two lineages."""

from __future__ import annotations

from io import StringIO
from typing import Any

import msgspec
import pytest
from rich.console import Console

from gyre.ledger import events as ev
from gyre.ledger.fold import fold_all
from gyre.ledger.tail import Line
from gyre.ledger.training_stats import statistics_of
from gyre.recipe.schema import Cells, Model, Objective, Recipe, Tasks, Train
from gyre.views.summary import summarise
from gyre.views.text import render, step_line

RECIPE = Recipe(
    name="x",
    model=Model(path="/m"),
    tasks=Tasks(path="/t"),
    train=Train(steps=2),
    cells=Cells(count=1, gpus_per_node=0),
)
OPENED = ev.Opened(pid=1, pid_start=1.0, host="h", code="0")


def lines(writer: str, events: list[Any], incarnation: int = 1, start: float = 10.0) -> list[Line]:
    return [Line(writer, incarnation, n, start + n, event) for n, event in enumerate(events)]


def committed(lineage: int, step: int, norm: float) -> ev.Committed:
    name = f"{lineage}.{step}"
    return ev.Committed(
        lineage=lineage,
        step=step,
        version=step,
        weight_version=f"{name}-00",
        manifest=name,
        checkpointed=step == 1,
        gradient_norm=norm,
    )


def packed(step: int, reward: float) -> ev.Packed:
    return ev.Packed(
        step=step,
        microsteps=[],
        executions=2,
        tokens_sampled=10,
        tokens_trained=6,
        tokens_dropped={"not_selected": 3, "auxiliary": 1},
        reward=reward,
        staleness_max=1,
    )


def opened(lineage: int, step: int) -> ev.LineageOpened:
    return ev.LineageOpened(lineage=lineage, step=step, version=step, weight_version="w", manifest="m")


def history() -> list[Line]:
    burst = ev.BurstOpened(
        burst=1,
        lineage=1,
        version=0,
        groups=[ev.GroupPlan("g00000", "a", 2), ev.GroupPlan("e0001x000", "held", 1, "eval")],
    )
    worker = [
        OPENED,
        ev.Finished(
            execution="g00000-00", attempt=1, outcome="graded", reason="finished", reward=1.0, tokens_sampled=5
        ),
        ev.Finished(
            execution="e0001x000-00", attempt=1, outcome="graded", reason="limit_disk", reward=0.5, tokens_sampled=5
        ),
    ]
    orders = ev.Dispatched(
        worker="worker-0",
        incarnation=1,
        executions=[ev.Dispatch("g00000-00", 1, "a"), ev.Dispatch("e0001x000-00", 1, "held", "eval")],
    )
    accepted = [
        ev.Accepted(writer="worker-0", incarnation=1),
        ev.Accepted(writer="cell-0", incarnation=2, cut={1: 3}),
    ]
    return [
        *lines("scheduler", [OPENED, accepted[0], burst, orders, accepted[1]]),
        *lines("worker-0", worker),
        *lines("processor", [OPENED, packed(1, 0.5), packed(2, 1.0)]),
        *lines("cell-0", [OPENED, opened(1, 0), committed(1, 1, 0.25), committed(1, 2, 0.5)], start=20.0),
        *lines("cell-0", [OPENED, opened(2, 1), committed(2, 2, 0.75)], incarnation=2, start=40.0),
    ]


def test_steps_that_stand_come_from_the_lineage_that_made_them() -> None:
    summary = summarise(fold_all(history()), RECIPE)
    assert [(s.step, s.lineage, s.gradient_norm) for s in summary.steps] == [(1, 1, 0.25), (2, 2, 0.75)]
    assert [s.reward for s in summary.steps] == [0.5, 1.0]
    assert summary.steps[1].seconds == 42.0 - 22.0


def test_tokens_add_up_in_every_step() -> None:
    for step in summarise(fold_all(history()), RECIPE).steps:
        assert step.tokens_sampled == step.tokens_trained + step.tokens_dropped
        assert step.tokens_dropped == sum(step.dropped.values())


def test_evaluations_and_the_waterlevel_are_apart_from_training() -> None:
    summary = summarise(fold_all(history()), RECIPE)
    assert [(e.burst, e.score) for e in summary.evals] == [(1, 0.5)]
    assert summary.waterlevel == 1  # g00000-01 is open


def test_ends_are_counted_by_their_reason() -> None:
    summary = summarise(fold_all(history()), RECIPE)
    assert summary.attempts_ended == {"finished": 1, "limit_disk": 1}
    Console(width=160, file=(printed := StringIO())).print(render(summary, now=0.0))
    assert "attempts that did not just finish: 1 limit_disk" in printed.getvalue()


def test_a_run_that_nobody_ended_and_nobody_keeps_has_failed() -> None:
    state = fold_all(history())
    assert summarise(state, RECIPE).state == "running"
    assert summarise(state, RECIPE, alive=False).state == "failed"
    assert summarise(fold_all([]), RECIPE).state == "pending"


def test_the_difference_of_trainer_and_engine_is_that_of_all_cells_and_raises_an_alarm() -> None:
    def done(grant: int, name: str, difference: float) -> ev.Done:
        stats = {"difference_max": abs(difference), **statistics_of([30, 300], [difference, difference / 10])}
        return ev.Done(grant=grant, lineage=1, step=1, microsteps=[name], seconds=1.0, tokens=1, stats=stats)

    def granted(cell: str, name: str) -> ev.Granted:
        return ev.Granted(grant=1, cell=cell, incarnation=1, lineage=1, step=1, microsteps=[name])

    orders = [ev.Accepted(writer=cell, incarnation=1) for cell in ("cell-0", "cell-1")]
    state = fold_all(
        [
            *lines("scheduler", [OPENED, *orders, granted("cell-0", "a"), granted("cell-1", "b")]),
            *lines("processor", [OPENED, packed(1, 0.5)]),
            *lines("cell-0", [OPENED, opened(1, 0), done(1, "a", 3e-4), committed(1, 1, 0.25)]),
            *lines("cell-1", [OPENED, done(1, "b", -4e-4)]),
        ]
    )
    (step,) = summarise(state, RECIPE).steps
    assert step.logprob_difference == 4e-4
    assert [(d.lengths, d.units) for d in step.differences] == [("16-63", 2), ("256-1023", 2)]
    assert step.differences[0].spread == pytest.approx(2.5e-7**0.5 / 2**0.5)
    assert "16-63 targets" in step.alarm  # the default clip is 3e-4
    assert "ALARM" in step_line(step, 2)
    wide = msgspec.structs.replace(RECIPE, objective=Objective(clip=(2e-3, 2e-3)))
    assert summarise(state, wide).steps[0].alarm == ""


def test_the_keys_that_scripts_read() -> None:
    found = msgspec.json.decode(msgspec.json.encode(summarise(fold_all(history()), RECIPE)))
    assert {"state", "steps", "cells", "waterlevel"} <= set(found)
    wanted = {"step", "version", "reward", "seconds", "staleness", "tokens_sampled", "tokens_trained", "tokens_dropped"}
    assert wanted <= set(found["steps"][0])
    assert {"name", "role", "since", "switches"} <= set(found["cells"][0])


def test_a_task_that_was_set_aside_is_named() -> None:
    told = [*history(), Line("scheduler", 1, 99, 99.0, ev.TaskSetAside(task="bad", reason="its grader failed"))]
    summary = summarise(fold_all(told), RECIPE)
    assert summary.set_aside == {"bad": "its grader failed"}
