"""Consumption against brute force: which groups may go into which step."""

from __future__ import annotations

import random
from itertools import product

import pytest

from gyre.ledger import events as ev
from gyre.ledger.fold import fold_all
from gyre.ledger.state import RunState
from gyre.ledger.tail import Line
from gyre.scheduling.consumption import consume, deadline, feasible
from gyre.scheduling.facts import World
from gyre.scheduling.settings import Settings

from .settings import make


def possible(deadlines: list[int], settings: Settings, step: int, taken: int) -> bool:
    """By trying every way to lay the groups into steps."""
    if not deadlines:
        return True
    last = max(deadlines)
    steps = range(step, last + 1)
    for places in product(steps, repeat=len(deadlines)):
        fits = all(place <= due for place, due in zip(places, deadlines, strict=True))
        full = all(
            sum(1 for place in places if place == s) <= settings.groups_per_step - (taken if s == step else 0)
            for s in steps
        )
        if fits and full:
            return True
    return False


@pytest.mark.parametrize("seed", range(120))
def test_feasible_is_what_brute_force_finds(seed: int) -> None:
    rng = random.Random(seed)
    settings = make(groups_per_step=rng.randint(1, 3))
    step = rng.randint(1, 3)
    taken = rng.randint(0, settings.groups_per_step)
    deadlines = [step + rng.randint(0, 3) for _ in range(rng.randint(0, 5))]
    assert feasible(deadlines, settings, step, taken) == possible(deadlines, settings, step, taken)


def test_a_deadline_that_has_passed_is_not_feasible() -> None:
    assert not feasible([2], make(groups_per_step=2), step=3, taken=0)


def lines_of(bursts: list[int], finished: list[str], consumed: list[tuple[int, str]]) -> list[Line]:
    """Bursts of so many groups of one execution; all before the newest burst's first step are committed."""
    scheduler: list[ev.Event] = [ev.Accepted(writer=writer, incarnation=1) for writer in ("worker-0", "cell-0")]
    number = 0
    for burst, count in enumerate(bursts, 1):
        plans = [ev.GroupPlan(f"g{number + i:05d}", "a", 1) for i in range(count)]
        number += count
        scheduler.append(ev.BurstOpened(burst=burst, lineage=1, version=burst - 1, groups=plans))
        for plan in plans:
            dispatch = ev.Dispatch(f"{plan.group}-00", 1, "a")
            scheduler.append(ev.Dispatched(worker="worker-0", incarnation=1, executions=[dispatch]))
    scheduler += [ev.Consumed(step=step, group=group) for step, group in consumed]
    worker = [ev.Finished(execution=f"{name}-00", attempt=1, outcome="graded", reward=1.0) for name in finished]
    core: list[ev.Event] = [
        ev.CellEntered(state="ready"),
        ev.LineageOpened(lineage=1, step=0, version=0, weight_version="0", manifest="m"),
    ]
    core += [
        ev.Committed(lineage=1, step=step, version=step, weight_version="v", manifest="m", checkpointed=True)
        for step in range(1, len(bursts))
    ]
    return [
        Line(writer, 1, n, 1.0, event)
        for writer, said in (("scheduler", scheduler), ("worker-0", worker), ("cell-0", core))
        for n, event in enumerate(said)
    ]


def state_of(bursts: list[int], finished: list[str], consumed: list[tuple[int, str]]) -> RunState:
    return fold_all(lines_of(bursts, finished, consumed))


def consumed_by(settings: Settings, state: RunState) -> list[ev.Event]:
    return consume(World(state, settings))


def test_completion_order_when_there_is_time() -> None:
    settings = make(groups_per_step=1, lead_steps=1, steps=9, executions=1)
    state = state_of([2], ["g00001"], [])
    assert consumed_by(settings, state) == [ev.Consumed(step=1, group="g00001")]


def test_a_group_whose_deadline_presses_is_waited_for() -> None:
    """g00000 must go into step 2: step 2's one place is not given to g00002, ready as it is."""
    settings = make(groups_per_step=1, lead_steps=1, steps=9, executions=1)
    state = state_of([2, 1], ["g00001", "g00002"], [(1, "g00001")])
    assert deadline(World(state, settings), "g00000") == 2
    assert consumed_by(settings, state) == []
    ready = state_of([2, 1], ["g00000", "g00001", "g00002"], [(1, "g00001")])
    assert consumed_by(settings, ready) == [ev.Consumed(step=2, group="g00000")]


def test_nobody_is_overtaken_by_more_than_the_bound() -> None:
    settings = make(groups_per_step=3, lead_steps=1, steps=9, executions=1, max_overtake=1)
    state = state_of([6], ["g00001", "g00002"], [(1, "g00001")])
    assert consumed_by(settings, state) == []
    allowed = make(groups_per_step=3, lead_steps=1, steps=9, executions=1, max_overtake=2)
    assert consumed_by(allowed, state) == [ev.Consumed(step=1, group="g00002")]


def test_too_few_graded_make_a_group_void() -> None:
    settings = make(groups_per_step=1, steps=9, executions=1, min_graded=2)
    state = state_of([1], ["g00000"], [])
    assert consumed_by(settings, state) == [ev.Consumed(step=1, group="g00000", void=True)]


def test_a_full_step_is_filled_and_the_next_waits_for_its_burst() -> None:
    settings = make(groups_per_step=1, lead_steps=1, steps=9, executions=1)
    full = state_of([2], ["g00000", "g00001"], [(1, "g00000")])
    assert consumed_by(settings, full) == [ev.StepFilled(step=1)]


@pytest.mark.parametrize("seed", range(60))
def test_consumption_never_strands_a_group(seed: int) -> None:
    """Whatever is ready in whatever order: all groups of a run are consumed in time, the waiting never for ever."""
    rng = random.Random(seed)
    places, lead, overtake = rng.randint(1, 3), rng.randint(0, 2), rng.choice([0, 2, 9])
    settings = make(groups_per_step=places, lead_steps=lead, steps=4, executions=1, max_overtake=overtake)
    size, phi = settings.groups_per_step, settings.lead_steps
    bursts = [min((phi + 1) * size, settings.steps * size)]
    finished: list[str] = []
    consumed: list[tuple[int, str]] = []
    while len(consumed) < settings.steps * size:
        state = state_of(bursts, finished, consumed)
        orders = consumed_by(settings, state)
        if orders and isinstance(orders[0], ev.Consumed):
            order = orders[0]
            assert order.step <= deadline(World(state, settings), order.group)
            consumed.append((order.step, order.group))
        elif orders:
            left = settings.steps * size - sum(bursts)
            bursts.append(min(size, left))  # the step is committed, the next burst opens
        else:
            waiting = [name for name in state.groups if name not in finished]
            assert waiting, "everything is ready and nothing is taken"
            finished.append(rng.choice(waiting))
