from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from gyre.ledger.microsteps import MicroStep
from gyre.trajectory.packing import OPEN_MICROSTEPS, Packer
from gyre.trajectory.samples import Sample

from .trees import canonical_bytes

BOUND = 20


def sample(number: int, size: int) -> Sample:
    """A sample of `size` tokens, all of them unlike those of other samples; every token but the first is a target."""
    targets = size - 1
    tokens = np.arange(size, dtype=np.int32) + 100 * number

    def column(value: int) -> np.ndarray:
        return np.full(targets, value, dtype=np.int32)

    return Sample(
        execution=f"g0-{number}",
        attempt=number % 3,
        tip=number,
        path=((number, size),),
        tokens=tokens,
        target_rows=np.arange(targets, dtype=np.int32),
        target_tokens=tokens[1:],
        behaviour_logprobs=-tokens[1:].astype(np.float32),
        target_turns=column(number),
        target_offsets=np.arange(targets, dtype=np.int32),
        target_versions=column(number + 1),
        target_lineages=column(1),
        weight=0.25,
        advantage=-float(number),
        temperature=0.5,
        dispatch_version=number + 2,
    )


JOURNAL = st.lists(st.one_of(st.none(), st.lists(st.integers(2, BOUND), max_size=6)), max_size=8)
"""None is a flush, a list is a group of samples of these sizes."""


def fold(journal: list[list[int] | None]) -> tuple[list[MicroStep], Packer, int]:
    packer, closed, number = Packer(4, BOUND), [], 0
    for entry in journal:
        if entry is None:
            closed += packer.flush()
        else:
            closed += packer.add_group([sample(number + i, size) for i, size in enumerate(entry)])
            number += len(entry)
    return closed, packer, number


@given(JOURNAL)
def test_every_sample_is_in_one_micro_step_within_the_bound(journal: list[list[int] | None]) -> None:
    closed, packer, number = fold(journal)
    closed += packer.end_step()
    sizes = [size for entry in journal if entry for size in entry]
    assert sorted(name for each in closed for name in each.executions) == sorted(f"g0-{i}" for i in range(number))
    for each in closed:
        assert each.step == 4
        assert len(each.executions) >= 1
        assert len(each.tokens) == sum(sizes[int(name[3:])] for name in each.executions) <= BOUND


@given(JOURNAL, st.integers(0, 8))
def test_a_restart_in_mid_step_derives_the_same_micro_steps(journal: list[list[int] | None], cut: int) -> None:
    before, _, _ = fold(journal[:cut])
    whole, packer, _ = fold(journal)
    whole += packer.end_step()
    assert [canonical_bytes(each) for each in before] == [canonical_bytes(each) for each in whole[: len(before)]]


@given(JOURNAL)
def test_after_a_flush_nothing_is_open(journal: list[list[int] | None]) -> None:
    _, packer, _ = fold([*journal, None])
    assert packer.flush() == []
    assert packer.end_step() == []


def test_rows_positions_and_provenance_of_paths_side_by_side() -> None:
    packer = Packer(4, BOUND)
    assert packer.add_group([sample(1, 3), sample(2, 2)]) == []
    (each,) = packer.end_step()
    assert each.tokens.tolist() == [100, 101, 102, 200, 201]
    assert each.positions.tolist() == [0, 1, 2, 0, 1]
    assert each.segments.tolist() == [0, 0, 0, 1, 1]
    assert each.target_rows.tolist() == [0, 1, 3]
    assert each.target_tokens.tolist() == [101, 102, 201]
    assert each.target_samples.tolist() == [0, 0, 1]
    assert each.target_turns.tolist() == [1, 1, 2]
    assert each.target_offsets.tolist() == [0, 1, 0]
    assert each.target_versions.tolist() == [2, 2, 3]
    assert each.target_lineages.tolist() == [1, 1, 1]
    assert each.behaviour_logprobs.tolist() == [-101.0, -102.0, -201.0]
    assert (each.executions, each.attempts.tolist()) == (("g0-1", "g0-2"), [1, 2])
    assert (each.advantages.tolist(), each.weights.tolist()) == ([-1.0, -2.0], [0.25, 0.25])
    assert (each.temperatures.tolist(), each.dispatch_versions.tolist()) == ([0.5, 0.5], [3, 4])
    for name, value in vars(each).items():
        if isinstance(value, np.ndarray):
            floats = ("behaviour_logprobs", "advantages", "weights", "temperatures")
            other = np.uint16 if name == "experts" else np.int32
            assert value.dtype == (np.float32 if name in floats else other), name


def closed_sizes(*sizes: int) -> list[list[int]]:
    """Sizes of the samples in each micro-step that closed before the step's end."""
    packer = Packer(4, BOUND)
    closed = packer.add_group([sample(i, size) for i, size in enumerate(sizes)])
    return [[sizes[int(name[3:])] for name in each.executions] for each in closed]


def test_first_fit_takes_the_oldest_with_room() -> None:
    assert closed_sizes(12, 15, 8, 5) == [[12, 8], [15, 5]]
    assert closed_sizes(10, 11, 10) == [[10, 10]]


def test_a_micro_step_closes_as_soon_as_nothing_can_fit() -> None:
    assert closed_sizes(20) == [[20]]
    assert closed_sizes(19) == [[19]], "no sample is a single token"
    assert closed_sizes(18) == []


def test_the_fullest_closes_when_too_many_are_open() -> None:
    assert OPEN_MICROSTEPS == 4
    assert closed_sizes(11, 13, 12, 13) == []
    assert closed_sizes(11, 13, 12, 13, 14) == [[13]]
    assert closed_sizes(11, 13, 12, 13, 14, 9) == [[13], [11, 9]]


def test_a_sample_over_the_bound_or_after_the_end_is_refused() -> None:
    packer = Packer(4, BOUND)
    with pytest.raises(ValueError, match="a path of execution g0-1 has 21 tokens, over the 20 of a micro-step"):
        packer.add_group([sample(1, 21)])
    packer.end_step()
    with pytest.raises(ValueError, match="step 4 has ended: execution g0-1 cannot be packed into it"):
        packer.add_group([sample(1, 3)])
