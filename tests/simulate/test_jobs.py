"""Durations and work as the workloads say."""

from __future__ import annotations

import math
from statistics import fmean

import pytest

from gyre.simulate.jobs import Drawn, capped_moment, scale
from tests.simulate.tiny import tiny


def test_the_mean_after_the_timeout_is_as_tabled() -> None:
    workload = tiny("executions.mean=600", "executions.timeout=1200", "executions.spread_group=0.8")
    jobs = Drawn(workload, 1)
    drawn = [job for number in range(4000) for job in jobs.group(number)]
    assert fmean(job.seconds for job in drawn) == pytest.approx(600.0, rel=0.02)
    assert fmean(job.work for job in drawn) == pytest.approx(workload.training.work, rel=0.02)
    assert max(job.seconds for job in drawn) == 1200.0
    assert all(job.timed_out == (job.seconds == 1200.0) for job in drawn)


def test_work_goes_with_duration_to_the_power() -> None:
    jobs = Drawn(tiny(), 1).group(0)
    assert jobs[0].work / jobs[1].work == pytest.approx((jobs[0].seconds / jobs[1].seconds) ** 0.7)


def test_the_partial_moment_of_the_log_normal() -> None:
    assert capped_moment(2.0, 0.0, 5.0, 1.0) == 2.0
    assert capped_moment(2.0, 0.5, 1e9, 1.0) == pytest.approx(2.0 * math.exp(0.125))
    assert capped_moment(1.0, 1.0, 1.0, 1.0) == pytest.approx(0.5 + math.exp(0.5) * 0.15865525, rel=1e-6)
    assert capped_moment(scale(3.0, 0.7, 4.0), 0.7, 4.0, 1.0) == pytest.approx(3.0)


def test_a_group_does_not_depend_on_what_was_asked_before() -> None:
    workload = tiny()
    one, other = Drawn(workload, 7), Drawn(workload, 7)
    later = one.group(5)
    assert [other.group(number) for number in range(6)][5] == later
    assert Drawn(workload, 8).group(5) != later
