from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, strategies as st

from gyre.trajectory.advantages import advantages

REWARDS = st.lists(st.floats(-10, 10), min_size=2, max_size=16)


def test_each_kind_by_hand() -> None:
    rewards = [1.0, 0.0, 0.0, 1.0, 0.5]
    assert advantages(rewards, "mean", 1e-4) == [0.5, -0.5, -0.5, 0.5, 0.0]
    std = math.sqrt(0.2)
    assert advantages(rewards, "mean_std", 1e-4) == pytest.approx([0.5 / std, -0.5 / std, -0.5 / std, 0.5 / std, 0])
    assert advantages(rewards, "leave_one_out", 1e-4) == pytest.approx([0.625, -0.625, -0.625, 0.625, 0])


def test_the_floor_holds_rewards_that_hardly_differ() -> None:
    assert advantages([0.0, 1e-6], "mean_std", 1e-4) == pytest.approx([-5e-3, 5e-3])


@pytest.mark.parametrize("kind", ["mean", "mean_std", "leave_one_out"])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 0.0, 1e9])
def test_equal_rewards_give_exactly_nothing(kind: Any, reward: float) -> None:
    assert advantages([reward] * 7, kind, 1e-4) == [0.0] * 7


@given(REWARDS)
def test_leave_one_out_is_the_reward_less_the_mean_of_the_others(rewards: list[float]) -> None:
    others = [(math.fsum(rewards) - reward) / (len(rewards) - 1) for reward in rewards]
    expected = [reward - baseline for reward, baseline in zip(rewards, others, strict=True)]
    assert advantages(rewards, "leave_one_out", 1e-4) == pytest.approx(expected, abs=1e-9)


@given(REWARDS, st.sampled_from(("mean", "mean_std", "leave_one_out")))
def test_advantages_sum_to_zero_and_keep_the_order(rewards: list[float], kind: Any) -> None:
    values = advantages(rewards, kind, 1e-4)
    assert math.fsum(values) == pytest.approx(0.0, abs=1e-6)
    ranked = [value for _, value in sorted(zip(rewards, values, strict=True))]
    assert ranked == sorted(ranked)


@pytest.mark.parametrize("rewards", [[], [1.0], [1.0, math.nan], [math.inf, 0.0]])
def test_what_cannot_be_compared_is_refused(rewards: list[float]) -> None:
    with pytest.raises(ValueError, match=r"two graded executions|must be finite"):
        advantages(rewards, "mean", 1e-4)


SUBNORMAL = 16 * math.ulp(0.0)
"""Numbers below the normal ones lose all their digits: that much for each of 16 rewards is no rounding of ours."""
KINDS = st.sampled_from(("mean", "mean_std", "leave_one_out"))


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=16), KINDS, st.floats(1e-6, 1.0))
def test_advantages_are_what_the_papers_say(rewards: list[float], kind: Any, floor: float) -> None:
    """In exact arithmetic, one reward at a time."""
    exact = [Fraction(reward) for reward in rewards]
    mean = sum(exact) / len(exact)
    variance = sum((reward - mean) ** 2 for reward in exact) / len(exact)
    for index, value in enumerate(advantages(rewards, kind, floor)):
        others = [reward for place, reward in enumerate(exact) if place != index]
        baseline = sum(others) / len(others) if kind == "leave_one_out" else mean
        scale = max(math.sqrt(variance), floor) if kind == "mean_std" else 1.0
        rounding = (1e-9 * max(map(abs, rewards)) + SUBNORMAL) / scale
        assert value == pytest.approx(float(exact[index] - baseline) / scale, rel=1e-9, abs=rounding)


@given(st.floats(0.0, 1.0), st.lists(st.integers(-3, 3), min_size=2, max_size=16), KINDS)
def test_rewards_that_nearly_tie_are_not_blown_up(reward: float, ulps: list[int], kind: Any) -> None:
    """Rewards that differ by rounding alone: what a grader that averages in another order gives."""
    rewards = [reward + n * math.ulp(reward) for n in ulps]
    values = advantages(rewards, kind, 1e-4)
    assert all(map(math.isfinite, values))
    assert max(map(abs, values)) <= 1e-10


@given(REWARDS, KINDS, st.floats(-5, 5), st.data())
def test_order_and_shift_do_not_matter(rewards: list[float], kind: Any, shift: float, data: st.DataObject) -> None:
    values = advantages(rewards, kind, 1e-2)
    order = data.draw(st.permutations(range(len(rewards))))
    permuted = advantages([rewards[i] for i in order], kind, 1e-2)
    assert permuted == pytest.approx([values[i] for i in order], abs=1e-9)
    assert advantages([r + shift for r in rewards], kind, 1e-2) == pytest.approx(values, abs=1e-9)
