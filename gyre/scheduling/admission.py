"""Admission: opening bursts, and dispatching their executions.

Invariant: groups are planned at burst boundaries only, until (phi + mu) * B are outstanding, never more than the run
still needs; the waterlevel never rises inside a burst. A lost attempt is dispatched again at once, a failed one after a
pause that holds no slot, within its budget, to which an attempt that the end of a job interrupted does not count; a
completed execution never is.
"""

from __future__ import annotations

import random

from gyre.ledger import events as ev
from gyre.ledger.state import Execution, execution_names
from gyre.scheduling.facts import World
from gyre.scheduling.settings import Settings

UNUSABLE = {"image_unavailable", "environment_unhealthy"}
"""Reasons for which a task is not to be run anywhere."""


def open_burst(world: World) -> list[ev.Event]:
    """The next burst, once every step of the one before is committed."""
    lineage, settings = world.reign(), world.settings
    if lineage is None or world.burst > settings.bursts:
        return []
    if lineage.step() < min(world.burst * settings.steps_per_burst, settings.steps):
        return []
    burst = world.burst + 1
    version = settings.version(lineage.step())
    plans = _train_plans(world) + _eval_plans(settings, burst)
    if burst > settings.bursts and not plans:
        return []
    return [ev.BurstOpened(burst=burst, lineage=world.number, version=version, groups=plans)]


def _train_plans(world: World) -> list[ev.GroupPlan]:
    state, settings = world.state, world.settings
    planned = state.planned
    room = (settings.lead_steps + settings.steps_per_burst) * settings.groups_per_step - len(state.outstanding)
    needed = settings.steps * settings.groups_per_step - planned
    return [
        ev.GroupPlan(f"g{number:05d}", task_of(world, number), settings.executions)
        for number in range(planned, planned + max(0, min(room, needed)))
    ]


def task_of(world: World, number: int) -> str:
    """Task of the `number`-th group: a seeded permutation of the tasks per epoch, without those set aside."""
    settings = world.settings
    tasks = [task for task in settings.tasks if task not in world.state.set_aside] or list(settings.tasks)
    epoch, index = divmod(number, len(tasks))
    return random.Random(f"{settings.seed}/{epoch}").sample(tasks, len(tasks))[index]


def _eval_plans(settings: Settings, burst: int) -> list[ev.GroupPlan]:
    last = burst > settings.bursts
    if not settings.eval_every or not (last or (burst - 1) % settings.eval_every == 0):
        return []
    return [
        ev.GroupPlan(f"e{burst:04d}x{index:03d}", task, settings.eval_samples, "eval")
        for index, task in enumerate(settings.eval_tasks)
    ]


def dispatch(world: World) -> list[ev.Event]:
    """Orders to workers, as their slots allow: older executions first, the freest worker first."""
    state = world.state
    todo = sorted(state.live.waiting | _left_behind(world))
    if not todo:
        return []
    free = _free_slots(world)
    todo.sort(key=lambda name: state.groups[state.executions[name].group].order)
    batches: dict[str, list[ev.Dispatch]] = {}
    excluded: list[ev.Event] = []
    for name in todo:
        execution = state.executions[name]
        attempt = _next_attempt(world, name) or 0
        if charged(execution, state.epoch) >= world.settings.attempts:
            excluded.append(ev.Excluded(execution=name, reason=_last_reason(execution)))
            continue
        if name in world.pausing:
            continue
        worker = max(free, key=lambda w: (free[w], w), default=None)
        if worker is None or free[worker] <= 0:
            break
        free[worker] -= 1
        batches.setdefault(worker, []).append(ev.Dispatch(name, attempt, execution.task, execution.purpose))
    return excluded + [
        ev.Dispatched(worker=worker, incarnation=state.incarnation(worker), executions=batch)
        for worker, batch in batches.items()
    ]


def _free_slots(world: World) -> dict[str, int]:
    state = world.state
    free = {
        worker: state.slots[worker][state.incarnation(worker)]
        for worker in world.settings.workers
        if worker not in world.dead and state.incarnation(worker) in state.slots.get(worker, {})
    }
    for worker in free:
        free[worker] -= len(state.live.running.get(worker, {}).get(state.incarnation(worker), ()))
    return free


def _left_behind(world: World) -> set[str]:
    """Open executions whose newest attempt runs nowhere: its worker is dead, or another incarnation now."""
    state = world.state
    left = {
        name
        for worker, incarnations in state.live.running.items()
        for incarnation, attempts in incarnations.items()
        if worker in world.dead or incarnation != state.incarnation(worker)
        for name, _ in attempts
    }
    return {name for name in left if _next_attempt(world, name) is not None}


def _next_attempt(world: World, name: str) -> int | None:
    """The number of the attempt to dispatch now, or None while one is under way."""
    execution = world.state.executions[name]
    last = execution.last()
    if last == 0:
        return 1
    attempt = execution.attempts[last]
    if attempt.finished is not None:
        return last + 1 if attempt.finished.outcome == "retry" else None
    lost = attempt.incarnation != world.state.incarnation(attempt.worker) or attempt.worker in world.dead
    return last + 1 if lost else None


def under_way(world: World, name: str) -> bool:
    """Does a worker that is there have an attempt of it?"""
    return _next_attempt(world, name) is None


def charged(execution: Execution, epoch: int) -> int:
    """How many attempts were used up: failed, or lost with their worker under the scheduler that dispatched them.

    Of an execution that waits for its next one. An attempt that was lost while the scheduler changed too went with its
    job (requeued, preempted, cancelled): that says nothing about the execution, and may happen any number of times.
    """
    attempts = [execution.attempts[number] for number in range(1, execution.last() + 1)]
    lost_under = [*(attempt.epoch for attempt in attempts[1:]), epoch]
    return sum(
        not attempt.finished.interrupted if attempt.finished is not None else attempt.epoch == lost
        for attempt, lost in zip(attempts, lost_under)
    )


def _last_reason(execution: Execution) -> str:
    finished = [a.finished for a in execution.attempts.values() if a.finished is not None]
    return f"attempts used up ({finished[-1].reason if finished else 'worker lost'})"


def set_aside(world: World) -> list[ev.Event]:
    """A task with two groups in which no execution could be graded, for want of its environment or of a grader that
    works, is set aside.
    """
    state = world.state
    failed: dict[str, int] = {}
    for name in state.void:
        group = state.groups[name]
        if group.plan.task not in state.set_aside and not state.graded(name):
            reasons = {_reason(state.executions[e]) for e in execution_names(group.plan)}
            if not reasons.isdisjoint(UNUSABLE) or all(reason.startswith("grader_") for reason in reasons):
                failed[group.plan.task] = failed.get(group.plan.task, 0) + 1
    return [
        ev.TaskSetAside(task=task, reason=f"its environment or its grader failed in {count} groups")
        for task, count in failed.items()
        if count >= 2
    ]


def _reason(execution: Execution) -> str:
    outcome = execution.outcome()
    return execution.excluded or (outcome.kind if outcome is not None else "")
