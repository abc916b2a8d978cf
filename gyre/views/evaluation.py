"""What an evaluation found: the pass rate with its interval, and each task's part.

Owns the shape of `gyre eval --json`. Invariant: excluded executions count nowhere but in `excluded`; an execution has
passed when its reward is 1.
"""

from __future__ import annotations

import math

from msgspec import Struct

from gyre.ledger.state import RunState, execution_names

Z95 = 1.959964
"""97.5th percentile of the standard normal distribution."""


class TaskResult(Struct, frozen=True, kw_only=True):
    task: str
    rewards: list[float]
    passed: int
    excluded: int


class Evaluation(Struct, frozen=True, kw_only=True):
    """`interval` is of the pass rate, at 95 %; both are None when nothing could be graded."""

    version: int
    pass_rate: float | None
    interval: tuple[float, float] | None
    reward: float | None
    executions: int
    excluded: int
    tasks: list[TaskResult]


def evaluate(state: RunState, burst: int = 1) -> Evaluation:
    """Results of the evaluation groups of one burst, by task in the order of their names."""
    found: dict[str, TaskResult] = {}
    for name in state.bursts[burst].groups if burst in state.bursts else []:
        plan = state.groups[name].plan
        if plan.purpose == "eval":
            found[plan.task] = _task(state, name)
    tasks = [found[task] for task in sorted(found)]
    rewards = [reward for task in tasks for reward in task.rewards]
    rates = [task.passed / len(task.rewards) for task in tasks if task.rewards]
    rate = sum(rates) / len(rates) if rates else None
    return Evaluation(
        version=state.bursts[burst].version if burst in state.bursts else 0,
        pass_rate=rate,
        interval=wilson(rate, len(rates)) if rate is not None else None,
        reward=sum(rewards) / len(rewards) if rewards else None,
        executions=len(rewards),
        excluded=sum(task.excluded for task in tasks),
        tasks=tasks,
    )


def _task(state: RunState, group: str) -> TaskResult:
    plan = state.groups[group].plan
    rewards = [outcome.reward for _, outcome in state.graded(group) if outcome.reward is not None]
    return TaskResult(
        task=plan.task,
        rewards=rewards,
        passed=sum(reward >= 1 for reward in rewards),
        excluded=len(list(execution_names(plan))) - len(rewards),
    )


def wilson(rate: float, count: int, z: float = Z95) -> tuple[float, float]:
    """Score interval of a proportion (Wilson 1927, J. Am. Stat. Assoc. 22). `count` is the number of tasks.

    Tasks are the units, and not executions: those of one task are not independent, so more samples of the same tasks
    make their mean sharper, and say nothing of other tasks.
    """
    denominator = 1 + z * z / count
    centre = (rate + z * z / (2 * count)) / denominator
    half = z * math.sqrt(rate * (1 - rate) / count + z * z / (4 * count * count)) / denominator
    return max(0.0, centre - half), min(1.0, centre + half)


def evaluation_lines(evaluation: Evaluation) -> list[str]:
    """A line a task, and the verdict."""
    lines = []
    for task in evaluation.tasks:
        graded = f"{task.passed} of {len(task.rewards)} passed"
        lines.append(f"{task.task}: {graded}" + (f", {task.excluded} excluded" if task.excluded else ""))
    if evaluation.pass_rate is None or evaluation.interval is None or evaluation.reward is None:
        return [*lines, "nothing could be graded"]
    low, high = evaluation.interval
    lines.append(
        f"pass rate {evaluation.pass_rate:.3f} (95 %: {low:.3f} to {high:.3f}, {len(evaluation.tasks)} tasks), "
        f"mean reward {evaluation.reward:.3f}, {evaluation.executions} executions, {evaluation.excluded} excluded"
    )
    return lines
