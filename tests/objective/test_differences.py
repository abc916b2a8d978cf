"""The trainer-engine difference by sample length, against loops, and what it sets off."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st

from gyre.ledger.training_stats import BOUNDS, LengthDifference, alarm, differences, statistics_of
from gyre.objective.differences import units_of
from gyre.objective.surrogate import OBJECTIVES

SAMPLES = st.lists(st.lists(st.floats(-1, 1, width=32), max_size=40), min_size=1, max_size=8)


def naive(name: str, samples: list[list[float]]) -> list[LengthDifference]:
    """Class by class, unit by unit."""
    found = []
    for least, below in zip((1, *BOUNDS), (*BOUNDS, 0), strict=True):
        units = []
        for each in samples:
            if each and least <= len(each) < (below or math.inf):
                units += [math.fsum(each) / len(each)] if name == "gspo" else each
        if units:
            spread = math.sqrt(math.fsum(u * u for u in units) / len(units))
            mean = math.fsum(units) / len(units)
            found.append(LengthDifference(least=least, below=below, units=len(units), mean=mean, spread=spread))
    return found


@given(SAMPLES, st.sampled_from(sorted(OBJECTIVES)), st.integers(0, 8))
def test_classes_are_those_of_a_loop_and_add_up(samples: list[list[float]], name: str, cut: int) -> None:
    stats: dict[str, float] = {}
    for part in (samples[:cut], samples[cut:]):
        values = torch.tensor([value for each in part for value in each])
        owners = torch.tensor([i for i, each in enumerate(part) for _ in each], dtype=torch.int64)
        for key, value in statistics_of(*units_of(name, values, owners, len(part))).items():
            stats[key] = stats.get(key, 0.0) + value
    found, expected = differences(stats), naive(name, samples)
    assert [(d.least, d.below, d.units) for d in found] == [(d.least, d.below, d.units) for d in expected]
    for one, other in zip(found, expected, strict=True):
        assert (one.mean, one.spread) == (pytest.approx(other.mean, abs=1e-5), pytest.approx(other.spread, abs=1e-5))


def test_a_clip_under_three_spreads_of_any_class_raises_an_alarm() -> None:
    short = LengthDifference(least=1, below=16, units=9, mean=0.0, spread=2e-4)
    long = LengthDifference(least=16384, below=0, units=2, mean=0.0, spread=1e-5)
    assert alarm([short, long], (6.1e-4, 7e-4)) == ""
    assert "0.0005 is under 3 x 0.0002" in alarm([long, short], (5e-4, 7e-4))
    assert "samples of 1-15 targets" in alarm([short, long], (7e-4, 5e-4))
    assert alarm([], (1e-9, 1e-9)) == ""
    assert long.lengths == "16384+"
