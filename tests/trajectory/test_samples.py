from __future__ import annotations

import re
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, strategies as st

from gyre.ledger.turns import Span, Turn
from gyre.recipe.schema import Model, Objective, Recipe, Tasks, Train, Trajectory
from gyre.trajectory.samples import Sample, select_execution
from gyre.trajectory.settings import Settings, packing_notice
from gyre.trajectory.tree import TrajectoryError

from .trees import attempts, settings, turn


def select(turns: list[Turn], **fields: object) -> tuple[list[Sample], dict[str, int]]:
    samples, dropped = select_execution(
        turns, settings(**fields), execution="g0-0", attempt=0, advantage=0.5, dispatch_version=2
    )
    return samples, {reason: count for reason, count in dropped.items()}


SETTINGS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 3),
        "max_paths": st.integers(1, 5),
        "min_targets": st.integers(0, 4),
        "tokens_per_microstep": st.sampled_from((3, 8, 1000)),
        "selection": st.sampled_from(("default", "paper")),
    }
)


@given(attempts(), SETTINGS)
def test_samples_hold_each_target_once_as_recorded(turns: list[Turn], chosen: dict[str, object]) -> None:
    samples, dropped = select(turns, **chosen)
    recorded = {each.turn: each for each in turns}
    versions = {each.turn: [s.version for s in each.spans for _ in range(s.length)] for each in turns}
    lineages = {each.turn: [s.lineage for s in each.spans for _ in range(s.length)] for each in turns}
    seen: set[tuple[int, int]] = set()
    for sample in samples:
        assert 1 <= sample.targets < len(sample.tokens) <= int(str(chosen["tokens_per_microstep"]))
        assert sample.target_rows[-1] + 2 == len(sample.tokens)
        assert np.all(np.diff(sample.target_rows) > 0)
        assert sample.tokens[sample.target_rows + 1].tolist() == sample.target_tokens.tolist()
        for i, place in enumerate(zip(sample.target_turns, sample.target_offsets, strict=True)):
            number, offset = int(place[0]), int(place[1])
            assert (number, offset) not in seen
            seen.add((number, offset))
            assert sample.target_tokens[i] == recorded[number].output[offset]
            assert sample.behaviour_logprobs[i] == np.float32(recorded[number].logprobs[offset])
            assert sample.target_versions[i] == versions[number][offset]
            assert sample.target_lineages[i] == lineages[number][offset]
    assert len(seen) + sum(dropped.values()) == sum(len(each.output) for each in turns)
    assert len(samples) <= int(str(chosen["max_paths"]))
    if samples:
        assert sum(sample.weight for sample in samples) == pytest.approx(1.0, abs=1e-12)
        assert [sample.weight for sample in samples] == [sample.targets / len(seen) for sample in samples]


def test_one_path_written_out() -> None:
    start = turn(0, context=[1, 2], output=[3, 4], spans=[Span(1, 5, 1), Span(1, 6, 1)])
    helper = turn(1, context=[9], output=[8], role="auxiliary")
    more = turn(2, start, keep=4, context=[5], output=[6, 7], logprobs=[-0.25, -2.0])
    end = turn(3, more, keep=7, context=[5], output=[6], constrained=True)
    samples, dropped = select([start, helper, more, end])
    assert dropped == {"auxiliary": 1, "constrained": 1}
    (sample,) = samples
    assert (sample.execution, sample.attempt, sample.tip) == ("g0-0", 0, 3)
    assert (sample.weight, sample.advantage, sample.temperature, sample.dispatch_version) == (
        1.0,
        0.5,
        1.0,
        2,
    )
    assert sample.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7], "cut behind the last target"
    assert sample.target_rows.tolist() == [1, 2, 4, 5]
    assert sample.target_tokens.tolist() == [3, 4, 6, 7]
    assert sample.target_turns.tolist() == [0, 0, 2, 2]
    assert sample.target_offsets.tolist() == [0, 1, 0, 1]
    assert sample.target_versions.tolist() == [5, 6, 3, 3]
    assert sample.behaviour_logprobs[2:].tolist() == [-0.25, -2.0]


def test_a_fork_in_the_middle_of_an_output_keeps_only_the_beginning_as_context() -> None:
    start = turn(0, context=[1], output=[2, 3, 4])
    fork = turn(1, start, keep=3, context=[5], output=[6])
    samples, dropped = select([start, fork])
    assert dropped == {}
    assert sorted(sample.tokens.tolist() for sample in samples) == [[1, 2, 3, 4], [1, 2, 3, 5, 6]]
    assert sorted(t for sample in samples for t in sample.target_tokens.tolist()) == [2, 3, 4, 6]


def test_a_shared_turn_is_credited_once() -> None:
    """OpenEnv PR 1036: two branches out of one turn must not train it twice."""
    shared = turn(0, context=[1], output=[2, 3, 4])
    branches = [turn(i, shared, keep=4, context=[5], output=[10 + i] * 2) for i in (1, 2)]
    samples, dropped = select([shared, *branches])
    assert dropped == {}
    assert sorted(sample.targets for sample in samples) == [2, 5]
    assert [sample.target_turns.tolist().count(0) for sample in samples] == [3, 0], "with the first path drawn"
    assert all(sample.tokens[:4].tolist() == [1, 2, 3, 4] for sample in samples), "context for the other"


def test_a_realigned_conversation_loses_no_token() -> None:
    """slime 2338: a re-rendered history forked the conversation and its response tokens vanished unaccounted."""
    first = turn(0, context=[1] * 5, output=[2] * 20)
    realigned = turn(1, first, keep=7, context=[3] * 18, output=[4] * 20)
    samples, dropped = select([first, realigned], max_paths=1)
    assert sum(sample.targets for sample in samples) + sum(dropped.values()) == 40
    assert set(dropped) == {"not_selected"}


def test_targets_of_several_temperatures_are_refused() -> None:
    turns = [
        turn(0, context=[1], output=[2], temperature=0.7),
        turn(1, context=[1], output=[2], temperature=1.0),
    ]
    with pytest.raises(TrajectoryError, match=re.escape("sampled at temperature")):
        select(turns)
    read_back = [turns[0], turn(1, context=[1], output=[2], temperature=float(np.float32(0.7)))]
    assert [sample.temperature for sample in select(read_back)[0]] == [float(np.float32(0.7))] * 2


def test_an_execution_without_turns_or_targets_has_no_sample() -> None:
    assert select([]) == ([], {})
    assert select([turn(0, context=[1], output=[2], status="aborted")]) == ([], {"orphaned": 1})


def test_settings_are_the_recipes() -> None:
    recipe = Recipe(
        name="r",
        seed=11,
        model=Model(),
        tasks=Tasks(path="t"),
        trajectory=Trajectory(max_paths=3, min_targets=2, selection="paper"),
        objective=Objective(advantage="leave_one_out", std_floor=0.5),
        train=Train(steps=1, tokens_per_microstep=77),
    )
    assert Settings.from_recipe(recipe) == Settings(
        seed=11,
        tokens_per_microstep=77,
        max_paths=3,
        min_targets=2,
        selection="paper",
        advantage="leave_one_out",
        std_floor=0.5,
        min_graded=2,
    )


def test_trees_fall_back_to_paths_where_sequences_are_split_over_ranks() -> None:
    def recipe(packing: Literal["paths", "tree"], ranks: int) -> Recipe:
        return Recipe(
            name="r",
            model=Model(),
            tasks=Tasks(path="t"),
            trajectory=Trajectory(packing=packing),
            train=Train(steps=1, context_parallel=ranks),
        )

    for asked, ranks, given_packing in (("tree", 1, "tree"), ("paths", 2, "paths"), ("tree", 2, "paths")):
        found = recipe(asked, ranks)  # type: ignore[arg-type]
        assert Settings.from_recipe(found).packing == given_packing
        assert bool(packing_notice(found)) == (asked != given_packing)
    assert packing_notice(recipe("tree", 2)).startswith("trajectory.packing: train.context_parallel = 2 ")
