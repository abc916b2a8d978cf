"""Laws of the simulated run, and cases that are worked out by hand."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings, strategies as st

from gyre.ledger import events as ev
from gyre.simulate.bound import bound
from gyre.simulate.jobs import Drawn, Job
from gyre.simulate.simulation import Plan, Simulation
from gyre.simulate.study import trial
from tests.simulate.tiny import Given, tiny

PLANS = [Plan("elastic"), Plan("colocate"), Plan("async", 1), Plan("async", 1, streaming=False), Plan("async", 2)]

BY_HAND = (
    "steps=2",
    "group.executions=2",
    "group.groups_per_step=1",
    "schedule.steps_per_burst=1",
    "cells.executions_per_cell=2",
    "cells.to_training=7",
    "cells.to_rollout=5",
    "cells.refresh=3",
    "training.microstep=10",
    "training.optimizer=20",
)
JOBS = Given([[(100.0, 30.0), (200.0, 50.0)], [(300.0, 15.0), (10.0, 25.0)]])


def test_colocate_on_one_cell_by_hand() -> None:
    workload = tiny(*BY_HAND, "cells.count=1")
    done = Simulation(workload, JOBS, Plan("colocate")).run()
    first = 3 + 200 + 7 + 80 + 20  # takes weights, rolls out, switches, 8 micro-steps, optimizer
    assert done.seconds == pytest.approx(first + 5 + 300 + 7 + 40 + 20, abs=1e-6)


def test_colocate_on_two_cells_by_hand() -> None:
    """One switch at a time: the core trains from 7 s after the last end, the other cell from 14 s."""
    workload = tiny(*BY_HAND, "cells.count=2", "steps=1")
    done = Simulation(workload, JOBS, Plan("colocate")).run()
    # 8 micro-steps of 10 s: the core's end at 220, 230, 240, 250, the other's at 227, 237, 247, 257
    assert done.seconds == pytest.approx(257 + 20, abs=1e-6)
    assert {name: cell.trained for name, cell in done.cells.items()} == {"cell-0": 40.0, "cell-1": 40.0}


def test_async_by_hand() -> None:
    """Its trainer is ready when the group is: no switch in the way."""
    workload = tiny(*BY_HAND, "cells.count=2")
    done = Simulation(workload, JOBS, Plan("async", 1)).run()
    assert done.seconds == pytest.approx(3 + 200 + 80 + 20 + 3 + 300 + 40 + 20, abs=1e-6)


def test_more_executions_than_rooms_wait_their_turn() -> None:
    workload = tiny(*BY_HAND, "cells.count=1", "cells.executions_per_cell=1", "steps=1")
    done = Simulation(workload, JOBS, Plan("colocate")).run()
    assert done.seconds == pytest.approx(3 + (100 + 200) + 7 + 80 + 20, abs=1e-6)


def test_an_overloaded_cell_is_shared() -> None:
    """Two on one room run at half speed until the short one ends at 200, then the long one has 100 s left."""
    workload = tiny(*BY_HAND, "cells.count=1", "cells.executions_per_cell=1", "cells.overload=slow", "steps=1")
    done = Simulation(workload, JOBS, Plan("colocate")).run()
    assert done.seconds == pytest.approx(3 + 200 + 100 + 7 + 80 + 20, abs=1e-6)


def test_a_deadline_on_the_wall_cuts_what_an_overload_slows_down() -> None:
    """Half speed from 3 to 203, full speed to 250: 147 of 200 s, and the work that so much gives."""
    overload = ("cells.executions_per_cell=1", "cells.overload=slow", "executions.timeout=250", "executions.mean=100")
    workload = tiny(*BY_HAND, "cells.count=1", *overload, "steps=1")
    done = Simulation(workload, JOBS, Plan("colocate")).run()
    assert done.timed_out == 1
    assert done.lost_work == pytest.approx(50 * (1 - (147 / 200) ** 0.7))
    assert done.rollout.served == pytest.approx(100 + 147)


@pytest.mark.parametrize("plan", PLANS, ids=lambda p: f"{p.mode}{p.split}{p.streaming}")
@pytest.mark.parametrize("losses", [0, 2000])
def test_every_execution_ends_once_and_every_microstep_is_trained_once(plan: Plan, losses: int) -> None:
    workload = tiny(f"failures.between={losses}", "failures.restart=100")
    done = Simulation(workload, Drawn(workload, 3), plan, seed=3, keep=True).run()
    lines = done.lines or []
    ended = Counter(line.event.execution for line in lines if isinstance(line.event, ev.Finished))
    assert set(ended) == set(done.state.executions) and set(ended.values()) == {1}
    assert len(ended) == workload.groups * workload.group.executions
    assert sorted(done.state.consumed) == sorted(done.state.groups)
    for step, (_, commit) in done.state.history().items():
        ordered = [line.event for line in lines if isinstance(line.event, ev.CommitOrdered) and line.event.step == step]
        assert sorted(ordered[-1].microsteps) == sorted(done.state.steps[step].microsteps)
        assert commit.step == step


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10_000), phi=st.integers(0, 3), mu=st.integers(1, 3))
def test_trained_work_is_the_same_in_all_modes_and_no_mode_beats_the_bound(seed: int, phi: int, mu: int) -> None:
    workload = tiny(f"schedule.lead_steps={phi}", f"schedule.steps_per_burst={mu}", "training.microstep=8")
    jobs = Drawn(workload, seed)
    trials = [trial(workload, jobs, plan, seed) for plan in PLANS]
    least = bound(workload, jobs).seconds
    given = sum(job.work for group in range(workload.groups) for job in jobs.group(group))
    rounding = workload.steps * workload.training.microstep / 2  # a step's error is half a micro-step
    for each in trials:
        assert each.seconds >= least
        assert each.work == pytest.approx(given - each.lost_work, rel=1e-9, abs=rounding)
        assert each.lag_max < phi + 2 * mu
        assert 0.0 <= each.idle_share < 1.0


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10_000), phi=st.integers(0, 4), mu=st.integers(1, 3), plan=st.sampled_from(PLANS))
def test_a_group_is_consumed_within_its_staleness(seed: int, phi: int, mu: int, plan: Plan) -> None:
    """phi + mu steps from the boundary that dispatched it, whatever the order of completion."""
    workload = tiny(f"schedule.lead_steps={phi}", f"schedule.steps_per_burst={mu}")
    done = Simulation(workload, Drawn(workload, seed), plan).run()
    for group, step in done.state.consumed.items():
        boundary = (done.state.groups[group].burst - 1) * mu
        assert boundary < step <= boundary + phi + mu


def test_the_waterlevel_never_rises_inside_a_burst() -> None:
    workload = tiny("schedule.lead_steps=1")
    done = Simulation(workload, Drawn(workload, 1), Plan("elastic"), keep=True).run()
    openings = {line.t for line in done.lines or [] if isinstance(line.event, ev.BurstOpened)}
    level = 0
    for at, now in done.levels:
        assert now <= level or at in openings
        level = now


def test_the_same_seed_gives_the_same_lines() -> None:
    workload = tiny("failures.between=3000", "failures.restart=60")
    runs = [Simulation(workload, Drawn(workload, 5), Plan("elastic"), seed=5, keep=True).run() for _ in range(2)]
    assert runs[0].lines == runs[1].lines
    other = Simulation(workload, Drawn(workload, 6), Plan("elastic"), seed=6, keep=True).run()
    assert other.lines != runs[0].lines


def test_an_excluded_execution_trains_nothing_and_a_group_with_too_few_is_void() -> None:
    class Half:
        def group(self, number: int) -> list[Job]:
            return [Job(100.0, 30.0, graded=number == 0 or index == 0) for index in range(4)]

    workload = tiny("steps=1", "group.groups_per_step=2", "training.microstep=10")
    done = Simulation(workload, Half(), Plan("elastic")).run()
    assert done.packing.total == 120.0
    assert [c.void for c in done.state.steps[1].consumed] == [False, True]
    assert bound(workload, Half()).seconds <= done.seconds


@pytest.mark.parametrize("turns", [0, 60])
@pytest.mark.parametrize("mode", ["elastic", "colocate", "async"])
def test_a_preempted_job_starts_its_open_executions_anew(mode: str, turns: int) -> None:
    usual = tiny(f"turns.seconds={turns}")
    workload = tiny(f"turns.seconds={turns}", "failures.preemption=1500", "failures.requeue=300")
    attempts = 0
    for seed in range(4):
        done = Simulation(workload, Drawn(workload, seed), Plan(mode), seed=seed, keep=True).run()
        ended = Counter(line.event.execution for line in done.lines or [] if isinstance(line.event, ev.Finished))
        assert set(ended) == set(done.state.executions) and set(ended.values()) == {1}
        most = max(len(execution.attempts) for execution in done.state.executions.values())
        assert most <= 1 + done.preemptions
        attempts = max(attempts, most)
        undisturbed = Simulation(usual, Drawn(usual, seed), Plan(mode), seed=seed).run()
        assert done.preemptions == 0 or done.seconds > undisturbed.seconds
    assert attempts > 1


def test_strict_order_is_slower_than_completion_order() -> None:
    workload = tiny("schedule.lead_steps=2", "steps=8")
    strict = tiny("schedule.lead_steps=2", "steps=8", "schedule.max_overtake=0")
    faster = sum(trial(workload, Drawn(workload, seed), Plan("elastic"), seed).seconds for seed in range(5))
    slower = sum(trial(strict, Drawn(strict, seed), Plan("elastic"), seed).seconds for seed in range(5))
    assert faster < slower


def test_latency_costs_time() -> None:
    swift, slow = tiny("steps=2"), tiny("steps=2", "cells.latency=5")
    times = [trial(each, Drawn(each, 0), Plan("elastic"), 0).seconds for each in (swift, slow)]
    assert times[0] < times[1] < times[0] + 40 * 5.0
