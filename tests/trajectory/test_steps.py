from __future__ import annotations

import math
import re
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, strategies as st

from gyre.ledger.microsteps import MicroStep
from gyre.ledger.turns import Turn
from gyre.trajectory.steps import ConsumedGroup, ExecutionRecord, Flush, StepBuilder, StepRecord, build_step
from gyre.trajectory.tree import TrajectoryError

from .trees import canonical_bytes, groups, settings, turn

Journal = list[ConsumedGroup | Flush]


@st.composite
def journals(draw: st.DrawFn) -> Journal:
    count = draw(st.integers(0, 3))
    entries: Journal = [draw(groups(f"g{index:05}")) for index in range(count)]
    for place in draw(st.lists(st.integers(0, count), max_size=2)):
        entries.insert(place, Flush())
    return entries


CHOSEN = st.fixed_dictionaries(
    {
        "max_paths": st.integers(1, 3),
        "tokens_per_microstep": st.sampled_from((6, 20, 1000)),
        "advantage": st.sampled_from(("mean", "mean_std", "leave_one_out")),
    }
)


@given(journals(), CHOSEN)
def test_sampled_is_trained_plus_dropped_and_each_token_is_trained_once(
    journal: Journal, chosen: dict[str, Any]
) -> None:
    microsteps, record = build_step(settings(**chosen), 3, journal)
    recorded = {
        (each.execution, each.attempt, each.turn): each
        for group in journal
        if isinstance(group, ConsumedGroup)
        for execution in group.executions
        for each in execution.turns
    }
    trained: set[tuple[str, int, int, int]] = set()
    weights: dict[str, float] = defaultdict(float)
    for each in microsteps:
        assert len(each.tokens) <= chosen["tokens_per_microstep"]
        for sample, execution in enumerate(each.executions):
            weights[execution] += float(each.weights[sample])
        for target in range(each.targets):
            sample, row = int(each.target_samples[target]), int(each.target_rows[target])
            number, offset = int(each.target_turns[target]), int(each.target_offsets[target])
            place = (each.executions[sample], int(each.attempts[sample]), number, offset)
            assert place not in trained
            trained.add(place)
            assert each.segments[row] == each.segments[row + 1] == sample
            assert each.positions[row + 1] == each.positions[row] + 1
            assert each.tokens[row + 1] == each.target_tokens[target] == recorded[place[:3]].output[offset]
    assert record.trained == len(trained)
    assert record.sampled == sum(len(each.output) for each in recorded.values())
    assert record.sampled == record.trained + sum(record.dropped.values())
    assert all(total == pytest.approx(1.0, abs=1e-6) for total in weights.values())
    assert record.microsteps == len(microsteps)
    assert record.samples == sum(len(each.executions) for each in microsteps)


@given(journals(), st.integers(0, 5), st.randoms(use_true_random=False))
def test_a_restart_derives_the_same_micro_steps_whatever_the_reading_order(
    journal: Journal, cut: int, random: Any
) -> None:
    builder, before = StepBuilder(settings(), 3), []
    for entry in journal[:cut]:
        before += builder.flush() if isinstance(entry, Flush) else builder.add_group(_shuffled(entry, random))
    whole, record = build_step(settings(), 3, journal)
    assert [canonical_bytes(each) for each in before] == [canonical_bytes(each) for each in whole[: len(before)]]
    again, same = build_step(
        settings(), 3, [entry if isinstance(entry, Flush) else _shuffled(entry, random) for entry in journal]
    )
    assert [canonical_bytes(each) for each in again] == [canonical_bytes(each) for each in whole]
    assert same == record


def _shuffled(group: ConsumedGroup, random: Any) -> ConsumedGroup:
    """The same group as if its shards had been read in another order."""
    executions = []
    for record in random.sample(group.executions, len(group.executions)):
        turns = random.sample(record.turns, len(record.turns))
        executions.append(
            ExecutionRecord(
                execution=record.execution,
                attempt=record.attempt,
                outcome=record.outcome,
                reward=record.reward,
                turns=turns,
            )
        )
    return ConsumedGroup(
        group=group.group,
        dispatch_version=group.dispatch_version,
        executions=executions,
        purpose=group.purpose,
        void=group.void,
    )


def graded(name: str, reward: float, *turns: Turn, attempt: int = 0) -> ExecutionRecord:
    mine = [_renamed(each, name) for each in turns]
    return ExecutionRecord(execution=name, attempt=attempt, outcome="graded", reward=reward, turns=mine)


def excluded(name: str, *turns: Turn) -> ExecutionRecord:
    mine = [_renamed(each, name) for each in turns]
    return ExecutionRecord(execution=name, attempt=0, outcome="excluded", turns=mine)


def _renamed(each: Turn, name: str) -> Turn:
    fields = {field: getattr(each, field) for field in each.__struct_fields__}
    return Turn(**{**fields, "execution": name})


def group(*executions: ExecutionRecord, name: str = "g0", **fields: Any) -> ConsumedGroup:
    return ConsumedGroup(group=name, dispatch_version=2, executions=list(executions), **fields)


def build(*entries: ConsumedGroup | Flush, **fields: Any) -> tuple[list[MicroStep], StepRecord]:
    return build_step(settings(**fields), 3, entries)


def chains(count: int, targets: int) -> list[Turn]:
    """`count` conversations of one turn each."""
    return [turn(i, context=[1], output=[2] * targets, role="sub-agent" if i else "main") for i in range(count)]


def by_execution(microsteps: list[MicroStep], field: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = defaultdict(list)
    for each in microsteps:
        for name, value in zip(each.executions, getattr(each, field).tolist(), strict=True):
            found[name].append(value)
    return dict(found)


def test_fan_out_does_not_shift_the_baseline() -> None:
    """slime PR 2300: A gives three paths with reward 1, B one with reward 0: the baseline is 0.5, not 0.75."""
    microsteps, record = build(group(graded("A", 1.0, *chains(3, 4)), graded("B", 0.0, *chains(1, 4))))
    assert by_execution(microsteps, "advantages") == {"A": [0.5] * 3, "B": [-0.5]}
    assert (record.executions, record.samples, record.reward) == (2, 4, 0.5)


def test_a_session_of_three_chains_weighs_one() -> None:
    """uni-agent 185: a three-chain session must not weigh three times as much as one of a single chain."""
    microsteps, _ = build(group(graded("A", 1.0, *chains(3, 4)), graded("B", 0.0, *chains(1, 8))))
    weights = by_execution(microsteps, "weights")
    assert weights["B"] == [1.0]
    assert weights["A"] == pytest.approx([1 / 3] * 3)


def test_a_shared_turn_is_credited_once_in_a_step() -> None:
    """OpenEnv PR 1036."""
    shared = turn(0, context=[1], output=[2, 3])
    forks = [turn(i, shared, keep=3, context=[4], output=[5]) for i in (1, 2, 3)]
    microsteps, record = build(group(graded("A", 1.0, shared, *forks), graded("B", 0.0, *chains(1, 1))))
    assert record.trained == 2 + 3 + 1
    assert sum(turns == 0 for each in microsteps for turns in each.target_turns.tolist()) == 2 + 1


def test_the_denominator_is_the_graded_executions_of_groups_that_are_not_void() -> None:
    one = chains(1, 4)
    microsteps, record = build(
        group(graded("a0", 1.0, *one), graded("a1", 0.0, *one), excluded("a2", *one), name="a"),
        group(graded("b0", 1.0, *one), graded("b1", 1.0, *one), name="b"),
        group(graded("c0", 1.0, *one), excluded("c1", *one), name="c"),
        group(graded("d0", 1.0, *one), graded("d1", 0.0, *one), name="d", void=True),
        group(graded("e0", 1.0, *one), graded("e1", 0.0, *one), name="e", purpose="eval"),
    )
    assert (record.groups, record.void_groups, record.executions) == (5, 2, 4)
    assert record.reward == 0.75
    assert sorted(by_execution(microsteps, "weights")) == ["a0", "a1"]
    assert (record.sampled, record.trained) == (44, 8)
    assert record.dropped == {"evaluation": 8, "excluded": 8, "void_group": 12, "zero_advantage": 8}


def test_an_excluded_execution_is_not_a_reward_of_zero() -> None:
    one = chains(1, 4)
    microsteps, record = build(group(graded("a", 1.0, *one), graded("b", 0.5, *one), excluded("c", *one)))
    assert by_execution(microsteps, "advantages") == {"a": [0.25], "b": [-0.25]}
    assert record.executions == 2


def test_a_reward_at_the_baseline_trains_nothing_but_counts() -> None:
    one = chains(1, 4)
    microsteps, record = build(group(*(graded(f"a{r}", r, *one) for r in (0.0, 0.5, 1.0))))
    assert sorted(by_execution(microsteps, "weights")) == ["a0.0", "a1.0"]
    assert (record.executions, record.dropped) == (3, {"zero_advantage": 4})


def test_aborted_attempts_of_a_lost_execution_are_sampled_and_dropped() -> None:
    lost = turn(0, context=[1], output=[2] * 7)
    counting = turn(0, context=[1], output=[3] * 4, attempt=1)
    retried = graded("a", 1.0, lost, counting, attempt=1)
    microsteps, record = build(group(retried, graded("b", 0.0, *chains(1, 4))))
    assert by_execution(microsteps, "attempts") == {"a": [1], "b": [0]}
    assert (record.sampled, record.trained, record.dropped) == (15, 8, {"aborted_attempt": 7})


def test_a_step_without_targets_has_a_record_and_no_micro_steps() -> None:
    microsteps, record = build()
    assert microsteps == []
    assert (record.executions, record.reward, record.sampled, record.dropped) == (0, None, 0, {})


def test_a_flush_closes_what_is_open_and_order_is_kept() -> None:
    one = chains(1, 4)
    first = group(graded("a", 1.0, *one), graded("b", 0.0, *one), name="first")
    second = group(graded("c", 1.0, *one), graded("d", 0.0, *one), name="second")
    assert [each.executions for each in build(first, second)[0]] == [("a", "b", "c", "d")]
    assert [each.executions for each in build(first, Flush(), second, Flush())[0]] == [("a", "b"), ("c", "d")]
    assert [each.executions for each in build(second, first)[0]] == [("c", "d", "a", "b")]


@pytest.mark.parametrize("reward", [None, math.nan, math.inf])
def test_a_grade_that_is_no_number_is_refused(reward: Any) -> None:
    with pytest.raises(TrajectoryError, match=f"execution a, attempt 0: graded with reward {reward}"):
        build(group(graded("a", reward), graded("b", 0.0)))


def test_rows_read_twice_and_groups_consumed_twice_are_refused() -> None:
    one = turn(0, context=[1], output=[2])
    pair = group(graded("a", 1.0, one), graded("b", 1.0, one, one))
    with pytest.raises(TrajectoryError, match=re.escape("execution b, attempt 0, turn 0: is recorded twice")):
        build(pair)
    stranger = ExecutionRecord(execution="a", attempt=0, outcome="excluded", turns=[one])
    with pytest.raises(TrajectoryError, match="execution a, attempt 0, turn 0: belongs to execution g0-0"):
        build(group(stranger))
    with pytest.raises(ValueError, match="group g0 is consumed twice in step 3"):
        build(group(), group())
    with pytest.raises(ValueError, match="group g0 has an execution twice"):
        build(group(excluded("a"), excluded("a")))
