"""Turns: engines shared by concurrency, contexts read anew, and the same laws as without them."""

from __future__ import annotations

import pytest

from gyre.simulate.jobs import Drawn, Job
from gyre.simulate.policies import order
from gyre.simulate.simulation import Plan, Simulation
from gyre.simulate.turns import TurnRollout, speed_at
from gyre.simulate.workload import Cells, Turns
from tests.simulate.test_simulation import BY_HAND, JOBS, PLANS
from tests.simulate.tiny import tiny

HALVED = "turns.curve=[[1.0, 1.0], [2.0, 0.5]]"


def rollout(cells: Cells, **turns: object) -> TurnRollout:
    made = TurnRollout(cells, Turns(**turns), ("a", "b"), order, seed=0)  # type: ignore[arg-type]
    made.plan("g", 1, 2)
    for cell in ("a", "b"):
        made.open(cell, True, 0.0)
        made.serve(cell, True, 0.0)
    return made


def ends(made: TurnRollout) -> list[tuple[float, str]]:
    found = []
    while made.running:
        at, ended = made.run(1e9)
        found += [(at, each.running.name) for each in ended]
    return found


def test_the_speed_of_a_call_by_how_many_there_are() -> None:
    curve = [(2.0, 1.0), (4.0, 0.6), (8.0, 0.5)]
    assert [speed_at(curve, n) for n in (0, 1, 2, 4, 8)] == [1.0, 1.0, 1.0, 0.6, 0.5]
    assert speed_at(curve, 3) == pytest.approx(0.8)
    assert speed_at(curve, 16) == pytest.approx(0.25), "a full engine shares what it has"


def test_calls_share_an_engine_by_the_curve() -> None:
    """As one long generation each: at half speed until the short one ends at 200, then the long one has 100 s left."""
    workload = tiny(*BY_HAND, "cells.count=1", "steps=1", "turns.seconds=1000", "turns.generation=1.0", HALVED)
    done = Simulation(workload, JOBS, Plan("colocate")).run()
    assert done.seconds == pytest.approx(3 + 200 + 100 + 7 + 80 + 20, abs=1e-6)


def test_tools_share_nothing() -> None:
    workload = tiny(*BY_HAND, "cells.count=1", "steps=1", "turns.seconds=10", "turns.generation=0.0", HALVED)
    done = Simulation(workload, JOBS, Plan("colocate")).run()
    assert done.seconds == pytest.approx(3 + 200 + 7 + 80 + 20, abs=1e-6)


@pytest.mark.parametrize(("prefill", "late"), [(0.0, 0.0), (40.0, 20.0)])
def test_a_context_is_read_anew_in_proportion(prefill: float, late: float) -> None:
    """Moved when half of it is there; a tool goes on meanwhile, and the next generation takes the longer."""
    made = rollout(Cells(prefill=prefill), seconds=100.0, generation=0.5, spread=0.0)
    made.dispatch("g-00", 1, "g", Job(400.0, 1.0))
    made.route("g-00", "a", 0.0)
    made.admit(0.0)
    made.run(199.0)
    made.route("g-00", "b", 200.0)
    assert ends(made) == [(pytest.approx(400.0 + late), "g-00")]
    assert made.calls == 4


def test_a_generation_stands_still_while_its_cell_does_not_serve_and_a_tool_does_not() -> None:
    made = rollout(Cells(), seconds=20.0, generation=0.5, spread=0.0)
    for name, seconds in (("g-00", 10.0), ("g-01", 30.0)):
        made.dispatch(name, 1, "g", Job(seconds, 1.0))
        made.route(name, "a", 0.0)
    made.admit(0.0)
    made.run(4.0)
    made.serve("a", False, 4.0)
    made.run(9.0)
    made.serve("a", True, 9.0)
    # generation 4 + 6, then the other's tool from 15 to 25 and a generation, with service away from 16 to 24
    assert made.run(1e9)[0] == pytest.approx(15.0)
    made.run(16.0)
    made.serve("a", False, 16.0)
    made.run(24.0)
    made.serve("a", True, 24.0)
    assert ends(made) == [(pytest.approx(35.0), "g-01")]


@pytest.mark.parametrize("plan", PLANS, ids=lambda p: f"{p.mode}{p.split}{p.streaming}")
def test_at_full_speed_turns_change_nothing(plan: Plan) -> None:
    """Up to C_e calls run at full speed: then the time is that of the workload without turns."""
    plain, turning = tiny(), tiny("turns.seconds=30")
    times = [Simulation(each, Drawn(each, 3), plan, seed=3).run().seconds for each in (plain, turning)]
    assert times[1] == pytest.approx(times[0], rel=1e-6)


def test_a_slow_engine_costs_time_and_a_deadline_cuts_what_it_slows() -> None:
    slow = tiny("turns.seconds=30", "turns.curve=[[1.0, 1.0], [6.0, 0.2]]")
    cut = tiny("turns.seconds=30", "turns.curve=[[1.0, 1.0], [6.0, 0.2]]", "executions.timeout=15m")
    usual = Simulation(tiny(), Drawn(tiny(), 0), Plan("elastic")).run().seconds
    done, short = (Simulation(each, Drawn(each, 0), Plan("elastic"), keep=True).run() for each in (slow, cut))
    assert done.seconds > 1.5 * usual
    assert short.lost_work > 0.0
    again = Simulation(slow, Drawn(slow, 0), Plan("elastic"), keep=True).run()
    assert again.lines == done.lines, "deterministic"
