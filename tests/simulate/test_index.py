"""The indexed decisions are the daemon's, order for order, on random runs with losses of cells."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from gyre.simulate.jobs import Drawn
from gyre.simulate.simulation import Plan
from tests.simulate.tiny import simulate_both, tiny

PLANS = st.one_of(
    st.builds(Plan, st.sampled_from(["elastic", "colocate"])),
    st.builds(Plan, st.just("async"), st.integers(1, 2), st.booleans()),
)


@settings(max_examples=25, deadline=None)
@given(
    plan=PLANS,
    seed=st.integers(0, 10_000),
    phi=st.integers(0, 3),
    mu=st.integers(1, 3),
    latency=st.sampled_from([0, 0.2]),
)
def test_the_orders_are_those_of_decide(plan: Plan, seed: int, phi: int, mu: int, latency: float) -> None:
    workload = tiny(f"schedule.lead_steps={phi}", f"schedule.steps_per_burst={mu}", f"cells.latency={latency}")
    simulate_both(workload, Drawn(workload, seed), plan)


@pytest.mark.parametrize("mode", ["elastic", "colocate", "async"])
@pytest.mark.parametrize("seed", range(4))
def test_the_orders_are_those_of_decide_when_cells_are_lost(mode: str, seed: int) -> None:
    workload = tiny(
        "failures.between=1500", "failures.restart=100", "cells.latency=0.5", f"schedule.lead_steps={seed % 2}"
    )
    done = simulate_both(workload, Drawn(workload, seed), Plan(mode), seed)
    assert any(cell.incarnation > 1 for cell in done.cells.values())
