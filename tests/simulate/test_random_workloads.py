"""Random workloads: the policy never deadlocks, and no law is broken on the way."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from gyre.ledger import events as ev
from gyre.simulate.jobs import Drawn
from gyre.simulate.simulation import Plan, Simulation
from gyre.simulate.workload import Workload, workload_of

CHUNK = 250
CHUNKS = 40


class Watched(Simulation):
    """Checks at every pause of the scheduler what must hold then."""

    low = 0

    def _decide(self) -> None:
        super()._decide()
        world, live = self.decider.world(), self.state.live
        able = {cell for cell in self.settings.cells if world.will_serve(cell)}
        if able:
            assert set(live.routed) <= able, "an open execution without a serving cell"
        opened = max(self.state.bursts, default=0)
        level = self.state.waterlevel
        assert level <= self.low or opened > self.burst, "the waterlevel rises inside a burst"
        self.low, self.burst = level, opened

    burst = 0


def draw(dice: random.Random) -> tuple[Workload, Plan]:
    """Small ones of every kind."""
    mode = dice.choice(["elastic", "elastic", "colocate", "async"])
    cells = dice.randint(2 if mode == "async" else 1, 6)
    executions = dice.randint(1, 6)
    mean = dice.choice([5.0, 300.0, 3000.0])
    table = {
        "name": "random",
        "steps": dice.randint(1, 4),
        "group": {
            "executions": executions,
            "groups_per_step": dice.randint(1, 4),
            "min_graded": dice.randint(1, executions),
        },
        "schedule": {
            "steps_per_burst": dice.randint(1, 3),
            "lead_steps": dice.randint(0, 3),
            "max_overtake": dice.choice([0, 2, 64]),
            "room": dice.choice([0.5, 1.0, 2.0]),
        },
        "cells": {
            "count": cells,
            "executions_per_cell": dice.randint(1, 12),
            "overload": dice.choice(["queue", "slow"]),
            "reroute": dice.choice([0.0, 5.0]),
            "prefill": dice.choice([0.0, 20.0]),
            "latency": dice.choice([0.0, 0.3]),
        },
        "executions": {
            "mean": mean,
            "timeout": dice.choice([2.0, 20.0]) * mean,
            "spread_group": dice.choice([0.0, 0.5, 1.2]),
            "spread_execution": dice.choice([0.0, 0.5]),
            "timeout_clock": dice.choice(["wall", "service"]),
        },
        "turns": {"seconds": dice.choice([0.0, 0.0, mean / 5.0])},
        "training": {
            "work": dice.choice([1.0, 40.0]),
            "microstep": dice.choice([5.0, 20.0]),
            "microsteps_per_grant": dice.randint(1, 2),
            "merge": dice.choice([0.0, 3.0]),
        },
        "failures": {
            "between": dice.choice([0.0, 0.0, 0.0, 4000.0]),
            "restart": dice.choice([50.0, 900.0]),
            "preemption": dice.choice([0.0, 0.0, 0.0, 5000.0 + 30.0 * mean]),
            "requeue": dice.choice([50.0, 2000.0]),
        },
    }
    plan = Plan(mode, dice.randint(1, max(1, cells - 1)), dice.random() < 0.8, dice.random() < 0.2)
    return workload_of(table, (), "random"), plan


def obeys(seed: int) -> None:
    workload, plan = draw(random.Random(seed))
    done = Watched(workload, Drawn(workload, seed), plan, seed, keep=True).run()
    lines, state = done.lines or [], done.state
    ended = Counter(line.event.execution for line in lines if isinstance(line.event, ev.Finished))
    assert set(ended.values()) == {1}, "an execution ends once"
    assert len(ended) == workload.groups * workload.group.executions, "work is conserved"
    phi, mu = workload.schedule.lead_steps, workload.schedule.steps_per_burst
    for group, step in state.consumed.items():
        assert step <= (state.groups[group].burst - 1) * mu + phi + mu, "staleness"
    for step, (number, _) in state.history().items():
        lineage = state.lineages[number]
        core = state.cells[lineage.cell][lineage.incarnation]
        own = [m for d in core.done.values() if (d.lineage, d.step) == (number, step) for m in d.microsteps]
        others = [m for found in lineage.merged if found.step == step for m in found.microsteps]
        assert sorted(own + others) == sorted(state.steps[step].microsteps), "every micro-step is merged once"


def test_some_random_workloads() -> None:
    for seed in range(150):
        obeys(seed)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_ten_thousand_random_workloads(chunk: int) -> None:
    for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        obeys(seed)
