from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, strategies as st

from gyre.ledger.turns import Span, Turn
from gyre.trajectory.tree import TrajectoryError, Tree

from .trees import attempts, kept_whole, turn, whole_sequences


@given(attempts(), st.data())
def test_whole_sequences_and_paths_are_those_of_the_recorded_parents(turns: list[Turn], data: st.DataObject) -> None:
    tree = Tree("g0-0", 0, turns)
    own = {each.turn: each.context + each.output for each in turns}
    for number, expected in whole_sequences(turns).items():
        tokens = tree.whole(number)
        assert tokens.dtype == np.int32
        assert tokens.tolist() == [own[owner][place] for owner, place in expected]
        end = data.draw(st.integers(0, len(expected)))
        assert tree.whole(number, end).tolist() == tokens[:end].tolist()
        owners = [(owner, i + 1) for i, (owner, _) in enumerate(expected)]
        assert tree.path(number) == list(dict(owners).items())


@given(attempts())
def test_a_turn_is_a_tip_unless_its_whole_sequence_is_kept(turns: list[Turn]) -> None:
    tree = Tree("g0-0", 0, turns)
    assert tree.tips == sorted({each.turn for each in turns} - kept_whole(turns))


@given(attempts())
def test_every_token_lies_on_the_path_of_a_tip(turns: list[Turn]) -> None:
    tree, whole = Tree("g0-0", 0, turns), whole_sequences(turns)
    every = {token for sequence in whole.values() for token in sequence}
    assert {token for tip in tree.tips for token in whole[tip]} == every


@given(attempts(), st.randoms(use_true_random=False))
def test_the_order_in_which_turns_are_read_does_not_matter(turns: list[Turn], random: object) -> None:
    shuffled = list(turns)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    one, two = Tree("g0-0", 0, turns), Tree("g0-0", 0, shuffled)
    assert one.tips == two.tips
    assert all(one.path(number) == two.path(number) for number in one.nodes)


def test_the_segment_before_a_compaction_is_a_leaf_of_its_own() -> None:
    start = turn(0, context=[1, 2], output=[3])
    more = turn(1, start, keep=3, context=[4], output=[5])
    compacted = turn(2, more, keep=1, context=[6], output=[7])
    tree = Tree("g0-0", 0, [start, more, compacted])
    assert tree.tips == [1, 2]
    assert tree.whole(1).tolist() == [1, 2, 3, 4, 5]
    assert tree.whole(2).tolist() == [1, 6, 7]
    assert tree.nodes[2].parent == 0, "position 1 is the first turn's own"


BROKEN: list[tuple[Callable[[], list[Turn]], str]] = [
    (lambda: [turn(0, context=[1]), turn(1, 0, keep=2)], "turn 1: keeps 2 of the 1 tokens of its parent 0"),
    (lambda: [turn(0, context=[1]), turn(1, 0, keep=-1)], "turn 1: keeps -1 of the 1 tokens of its parent 0"),
    (lambda: [turn(0, keep=1)], "turn 0: is a root but keeps 1 tokens"),
    (lambda: [turn(1, 3), turn(3)], "turn 1: its parent 3 is not an earlier turn"),
    (lambda: [turn(1, 1)], "turn 1: its parent 1 is not an earlier turn"),
    (lambda: [turn(2), turn(2)], "turn 2: is recorded twice"),
    (lambda: [turn(-1)], "turn -1: has a negative number"),
    (lambda: [turn(0, role="boss")], "turn 0: has an unknown role or status (boss, committed)"),
    (lambda: [turn(0, status="lost")], "turn 0: has an unknown role or status (main, lost)"),
    (lambda: [turn(0, attempt=1)], "turn 0: belongs to execution g0-0, attempt 1"),
    (
        lambda: [turn(0, output=[1, 2], logprobs=[0.0])],
        "turn 0: has 1 log-probabilities for 2 sampled tokens",
    ),
    (lambda: [turn(0, output=[1], spans=[])], "turn 0: its version spans [] do not cover 1 sampled tokens"),
    (
        lambda: [turn(0, output=[1], spans=[Span(1, 1, 2), Span(1, 1, -1)])],
        "turn 0: its version spans [2, -1] do not cover 1 sampled tokens",
    ),
    (
        lambda: [turn(0, output=[1], logprobs=[float("nan")])],
        "turn 0: has a log-probability that is not finite",
    ),
    (lambda: [turn(0, context=[2**31])], "turn 0: has a token id over 32 bits"),
    (lambda: [turn(0, context=[-1])], "turn 0: has a negative token id"),
]


@pytest.mark.parametrize(("turns", "problem"), BROKEN, ids=[problem for _, problem in BROKEN])
def test_broken_turns_are_refused_by_name(turns: Callable[[], list[Turn]], problem: str) -> None:
    with pytest.raises(TrajectoryError, match="^" + re.escape(f"execution g0-0, attempt 0, {problem}") + "$"):
        Tree("g0-0", 0, turns())
