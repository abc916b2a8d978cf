"""Small workloads for tests, and the plain decisions next to the indexed ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gyre.ledger import events as ev
from gyre.scheduling.decide import decide
from gyre.scheduling.decider import Decider
from gyre.scheduling.facts import World
from gyre.simulate.jobs import Job
from gyre.simulate.simulation import Plan, Simulation
from gyre.simulate.workload import Workload, workload_of


def tiny(*settings: str) -> Workload:
    """Three cells of eight rooms, steps of four groups of four executions of some minutes."""
    table: dict[str, Any] = {
        "name": "tiny",
        "steps": 6,
        "group": {"executions": 4, "groups_per_step": 4},
        "schedule": {"steps_per_burst": 2},
        "cells": {"count": 3, "executions_per_cell": 12},
        "executions": {"mean": 600.0, "timeout": 3600.0, "spread_group": 0.5, "spread_execution": 0.4},
        "training": {"work": 40.0, "microstep": 20.0},
    }
    return workload_of(table, settings, "tiny")


class Given:
    """Jobs as listed: a list of groups, each a list of (seconds, work)."""

    def __init__(self, groups: Sequence[Sequence[tuple[float, float]]]) -> None:
        self._groups = [[Job(seconds, work) for seconds, work in group] for group in groups]

    def group(self, number: int) -> Sequence[Job]:
        return self._groups[number]


class BothDecider(Decider):
    """Asks the daemon's `decide` each time as well: the orders have to be the same."""

    def decide(self) -> list[ev.Event]:
        plain = decide(World(self._state, self._settings, self.dead, self.waiting))
        indexed = super().decide()
        assert indexed == plain
        return indexed


def simulate_both(workload: Workload, jobs: Any, plan: Plan, seed: int = 0) -> Simulation:
    simulation = Simulation(workload, jobs, plan, seed)
    simulation.decider = BothDecider(simulation.state, simulation.settings)
    return simulation.run()
