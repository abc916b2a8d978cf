"""The processor's step: the same micro-steps, whatever it had read when it looked, and whoever looked before."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings as hypothesis_settings, strategies as st

from gyre.ledger import events as ev
from gyre.ledger.fold import fold
from gyre.ledger.microstep_files import digest
from gyre.ledger.state import RunState
from gyre.ledger.tail import Line
from gyre.ledger.turns import Turn
from gyre.processes.processor import StepInHand
from gyre.trajectory.steps import StepRecord
from tests.trajectory.trees import attempts, settings

STEP = 1


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[ev.Event], list[ev.Event], dict[str, list[Turn]]]:
    """(what happened before the step, the scheduler's lines about it, turns)."""
    count, size = draw(st.integers(1, 3)), 2
    plans = [ev.GroupPlan(f"g{index:05}", "task", size) for index in range(count)]
    turns: dict[str, list[Turn]] = {}
    before: list[ev.Event] = [ev.BurstOpened(burst=1, lineage=1, version=0, groups=plans)]
    for plan in plans:
        for index in range(size):
            name = f"{plan.group}-{index:02}"
            turns[name] = draw(attempts(name, 1, most=5))
            reward = float(draw(st.integers(0, 1)))
            before.append(ev.Finished(execution=name, attempt=1, outcome="graded", reward=reward))
    orders: list[ev.Event] = []
    for plan in draw(st.permutations(plans)):
        orders.append(ev.Consumed(step=STEP, group=plan.group, void=draw(st.integers(0, 5)) == 0))
        orders += [ev.Flushed(step=STEP)] * draw(st.integers(0, 2))
    return before, [*orders, ev.StepFilled(step=STEP)], turns


def advance(in_hand: StepInHand, state: RunState) -> tuple[list[str], StepRecord | None]:
    made, record = in_hand.advance(state)
    return [digest(microstep) for microstep in made], record


@given(histories(), st.data())
@hypothesis_settings(deadline=None, max_examples=60)
def test_a_step_is_the_same_read_line_by_line_in_pieces_or_whole(history: Any, data: st.DataObject) -> None:
    before, orders, turns = history
    chosen = settings(tokens_per_microstep=12)

    def read(looks: set[int]) -> tuple[list[str], StepRecord | None]:
        state, n = RunState(), 0
        in_hand = StepInHand(chosen, STEP, lambda name: turns[name])
        made: list[str] = []
        for event in [*before, *orders]:
            fold(state, Line("scheduler", 1, n, 0.0, event))
            n += 1
            if n in looks:
                more, record = advance(in_hand, state)
                made += more
                assert record is None or n == len(before) + len(orders)
        if n not in looks:
            more, record = advance(in_hand, state)
            made += more
        return made, record

    lines = len(before) + len(orders)
    whole = read(set())
    assert whole[1] is not None
    assert read(set(range(1, lines + 1))) == whole
    assert read(data.draw(st.sets(st.integers(1, lines)))) == whole
