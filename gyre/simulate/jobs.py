"""What an execution of a workload is: how long it takes, and what training it gives.

Owns the distribution of durations and work. Invariant: a group's jobs follow from (seed, number of the group) alone, so
every mode, cell count and setting is given the very same executions. Pure.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

from gyre.simulate.workload import Workload

_PHI = NormalDist().cdf


@dataclass(frozen=True, slots=True)
class Job:
    """One execution. `seconds` of service until it ends, `work` in cell-seconds of training."""

    seconds: float
    work: float
    timed_out: bool = False
    graded: bool = True


class Jobs(Protocol):
    """Where the executions of a run come from."""

    def group(self, number: int) -> Sequence[Job]:
        """The executions of the run's `number`-th group (from 0), in their order."""
        ...


class Drawn:
    """Jobs drawn from a workload's distributions."""

    def __init__(self, workload: Workload, seed: int) -> None:
        executions, training = workload.executions, workload.training
        self._workload, self._seed = workload, seed
        self._scale = scale(
            executions.mean, math.hypot(executions.spread_group, executions.spread_execution), executions.timeout
        )
        sigma = math.hypot(executions.spread_group, executions.spread_execution)
        self._work = training.work / capped_moment(self._scale, sigma, executions.timeout, training.exponent)
        self._known: dict[int, Sequence[Job]] = {}

    def group(self, number: int) -> Sequence[Job]:
        found = self._known.get(number)
        if found is None:
            found = self._known[number] = self._draw(number)
        return found

    def _draw(self, number: int) -> Sequence[Job]:
        executions = self._workload.executions
        dice = random.Random(f"{self._seed}/{number}")
        of_group = executions.spread_group * dice.gauss(0.0, 1.0)
        jobs = []
        for _ in range(self._workload.group.executions):
            seconds = self._scale * math.exp(of_group + executions.spread_execution * dice.gauss(0.0, 1.0))
            cut = min(seconds, executions.timeout)
            jobs.append(Job(cut, self._work * cut**self._workload.training.exponent, seconds > executions.timeout))
        return jobs


@dataclass(frozen=True)
class Recorded:
    """Jobs of a run's ledger, in the order of dispatch; beyond its last group they begin again."""

    groups: Sequence[Sequence[Job]]

    def group(self, number: int) -> Sequence[Job]:
        return self.groups[number % len(self.groups)]


def capped_moment(scaled: float, sigma: float, cap: float, power: float) -> float:
    """E[min(scaled * exp(sigma * z), cap) ** power] for a standard normal z (the log-normal's partial moment)."""
    if sigma == 0.0:
        return min(scaled, cap) ** power
    edge = math.log(cap / scaled) / sigma
    below = scaled**power * math.exp(0.5 * (power * sigma) ** 2) * _PHI(edge - power * sigma)
    return below + cap**power * (1.0 - _PHI(edge))


def scale(mean: float, sigma: float, cap: float) -> float:
    """The scale at which the mean after the cap is `mean` (< cap), by bisection."""
    low, high = 0.0, mean
    while capped_moment(high, sigma, cap, 1.0) < mean:
        low, high = high, 2.0 * high
    for _ in range(80):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if capped_moment(middle, sigma, cap, 1.0) < mean else (low, middle)
    return 0.5 * (low + high)
