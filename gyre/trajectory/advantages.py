"""Advantages of the executions of one group.

Owns the baseline. Invariant: one number an execution, from the rewards of graded executions only; how many
paths or samples an execution yields cannot shift it. Equal rewards give exactly zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal


def advantages(
    rewards: Sequence[float],
    kind: Literal["mean", "mean_std", "leave_one_out"],
    std_floor: float,
) -> list[float]:
    """One advantage for each reward r_i of the n >= 2 graded executions of a group, in the same order.

    mean: r_i - mean(r) (Dr. GRPO, arXiv 2503.20783).
    mean_std: (r_i - mean(r)) / max(std(r), std_floor) with the population's standard deviation (GRPO, arXiv
    2402.03300); the floor keeps rewards that hardly differ from being blown up.
    leave_one_out: r_i - mean of the others' = n / (n - 1) * (r_i - mean(r)) (RLOO, arXiv 2402.14740).

    Raises `ValueError` for fewer than two rewards or one that is not finite.
    """
    n = len(rewards)
    if n < 2:
        raise ValueError(f"a group needs two graded executions or more to compare, not {n}")
    if not all(map(math.isfinite, rewards)):
        raise ValueError(f"rewards must be finite: {list(rewards)}")
    if min(rewards) == max(rewards):
        return [0.0] * n  # the rounding of the mean must not leave a signal
    mean = math.fsum(rewards) / n
    centred = [reward - mean for reward in rewards]
    if kind == "mean":
        return centred
    if kind == "leave_one_out":
        return [value * n / (n - 1) for value in centred]
    std = math.sqrt(math.fsum(value * value for value in centred) / n)
    return [value / max(std, std_floor) for value in centred]
