"""Recorded experts along paths and in micro-steps, against an oracle that goes token by token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from gyre.ledger.routing import NO_EXPERTS, Routing
from gyre.ledger.turns import Turn
from gyre.trajectory.experts import Records, experts_along, stacked
from gyre.trajectory.packing import Packer
from gyre.trajectory.samples import select_execution
from gyre.trajectory.tree import TrajectoryError

from .trees import attempts, settings, whole_sequences

LAYERS, CHOSEN = 2, 3


def code(turn: int, position: int) -> int:
    return 1000 * turn + position


def recorded(turns: list[Turn], missing: set[int]) -> Records:
    """What the proxy records of each call but the `missing`: from the last token that it kept to the last but one."""
    whole, records = whole_sequences(turns), {}
    for each in turns:
        start = max(each.keep - 1, 0)
        codes = [code(each.turn, position) for position in range(start, len(whole[each.turn]) - 1)]
        table = np.repeat(np.array(codes, "<u2"), LAYERS * CHOSEN)
        if each.turn not in missing and codes:
            records[0, each.turn] = Routing(
                execution="g0-0", attempt=0, turn=each.turn, start=start, layers=LAYERS, chosen=CHOSEN, item_size=2,
                experts=table.tobytes(),
            )  # fmt: skip
    return records


@given(attempts(), st.sets(st.integers(0, 12)), st.sampled_from((3, 8, 1000)))
def test_a_row_has_the_choice_of_the_call_that_first_computed_it(
    turns: list[Turn], missing: set[int], bound: int
) -> None:
    records, whole = recorded(turns, missing), whole_sequences(turns)
    samples, _ = select_execution(
        turns, settings(tokens_per_microstep=bound), execution="g0-0", attempt=0, advantage=1.0, dispatch_version=1,
        routing=records,
    )  # fmt: skip
    for sample in samples:
        known = [number for number, _ in sample.path if (0, number) in records]
        if not known:
            assert sample.experts is None
            continue
        assert sample.experts is not None and sample.experts.shape == (len(sample.tokens), LAYERS, CHOSEN)
        for position, row in enumerate(sample.experts):
            token = whole[sample.tip][position]
            computed = [
                number
                for number in known
                if records[0, number].start <= position < len(whole[number]) - 1 and whole[number][position] == token
            ]
            expected = code(computed[0], position) if computed else NO_EXPERTS
            assert (row == expected).all(), (sample.path, position)


@given(attempts(), st.sets(st.integers(0, 12)), st.sampled_from(("paths", "tree")))
def test_a_micro_steps_rows_have_the_experts_of_their_tokens(
    turns: list[Turn], missing: set[int], packing: str
) -> None:
    records, whole = recorded(turns, missing), whole_sequences(turns)
    tokens = {each.turn: [*each.context, *each.output] for each in turns}
    samples, _ = select_execution(
        turns, settings(), execution="g0-0", attempt=0, advantage=1.0, dispatch_version=1, routing=records
    )
    packer = Packer(1, 64, "tree" if packing == "tree" else "paths")
    made = [*packer.add_group(samples), *packer.end_step()]
    assert any(len(each.experts) for each in made) == any(sample.experts is not None for sample in samples)
    for microstep in made:
        assert len(microstep.experts) in (0, len(microstep.tokens))
        for token, position, row in zip(microstep.tokens, microstep.positions, microstep.experts, strict=False):
            if row[0, 0] != NO_EXPERTS:
                number, found = divmod(int(row[0, 0]), 1000)
                owner, place = whole[number][position]
                assert (row == row[0, 0]).all() and found == position and tokens[owner][place] == token


def test_samples_without_records_stand_beside_those_that_have_some() -> None:
    table = np.ones((2, LAYERS, CHOSEN), np.uint16)
    found = stacked([None, table, None], [1, 2, 3])
    assert found[:, 0, 0].tolist() == [NO_EXPERTS, 1, 1, NO_EXPERTS, NO_EXPERTS, NO_EXPERTS]
    assert stacked([None, None], [1, 2]).shape == (0, 0, 0)


def test_records_of_two_mixtures_contradict_each_other() -> None:
    def record(turn: int, chosen: int) -> Routing:
        return Routing(
            execution="e",
            attempt=0,
            turn=turn,
            start=0,
            layers=1,
            chosen=chosen,
            item_size=1,
            experts=bytes(2 * chosen),
        )

    records = {(0, 0): record(0, 1), (0, 1): record(1, 2)}
    with pytest.raises(TrajectoryError, match="experts were recorded in shapes"):
        experts_along([(0, 2), (1, 4)], 0, records)
