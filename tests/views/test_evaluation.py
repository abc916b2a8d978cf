"""The pass rate and its interval, on a hand-made history."""

from __future__ import annotations

import pytest

from gyre.ledger import events as ev
from gyre.ledger.fold import fold_all
from gyre.views.evaluation import evaluate, evaluation_lines, wilson
from tests.views.test_summary import OPENED, lines


def history(rewards: dict[str, list[float | None]]) -> list[object]:
    """One burst of evaluation groups, one a task; None: the execution was excluded."""
    groups = [ev.GroupPlan(f"e0001x{i:03d}", task, len(rewards[task]), "eval") for i, task in enumerate(rewards)]
    names = [
        (f"{plan.group}-{index:02d}", plan.task, reward)
        for plan in groups
        for index, reward in enumerate(rewards[plan.task])
    ]
    scheduler = [
        OPENED,
        ev.Accepted(writer="scheduler", incarnation=1),
        ev.Accepted(writer="worker-0", incarnation=1),
        ev.BurstOpened(burst=1, lineage=1, version=3, groups=groups),
        ev.Dispatched(
            worker="worker-0", incarnation=1, executions=[ev.Dispatch(name, 1, task, "eval") for name, task, _ in names]
        ),
    ]
    worker = [OPENED] + [
        ev.Finished(execution=name, attempt=1, outcome="excluded" if reward is None else "graded", reward=reward)
        for name, _, reward in names
    ]
    return [*lines("scheduler", scheduler), *lines("worker-0", worker)]


def test_tasks_are_the_units_and_excluded_executions_count_nowhere() -> None:
    found = evaluate(fold_all(history({"b": [1.0, 0.5, None], "a": [1.0, 1.0], "c": [None]})))
    assert [(task.task, task.passed, len(task.rewards), task.excluded) for task in found.tasks] == [
        ("a", 2, 2, 0),
        ("b", 1, 2, 1),
        ("c", 0, 0, 1),
    ]
    assert found.pass_rate == 0.75
    assert found.interval == wilson(0.75, 2)
    assert found.reward == 3.5 / 4
    assert (found.executions, found.excluded, found.version) == (4, 2, 3)
    assert evaluation_lines(found)[-1].startswith("pass rate 0.750 (95 %: ")


def test_nothing_graded_has_no_rate() -> None:
    found = evaluate(fold_all(history({"a": [None]})))
    assert (found.pass_rate, found.interval, found.reward) == (None, None, None)
    assert evaluation_lines(found) == ["a: 0 of 0 passed, 1 excluded", "nothing could be graded"]


def test_the_interval_is_wilsons() -> None:
    # 8 of 10, Agresti and Coull 1998's form: centre (8 + z2/2) / (10 + z2), z2 = 3.8415
    low, high = wilson(0.8, 10)
    assert low == pytest.approx(0.4902, abs=1e-4)
    assert high == pytest.approx(0.9433, abs=1e-4)
    assert wilson(0.0, 5)[0] == 0.0
    assert wilson(1.0, 5)[1] == 1.0
