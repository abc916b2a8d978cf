"""A run's ledger, simulated in its own mode, predicts its own time; and in another mode that mode's time."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre.errors import UserError
from gyre.ledger.state import RunState
from gyre.recipe.load import load_recipe
from gyre.recipe.schema import Recipe
from gyre.simulate.jobs import Drawn, Recorded
from gyre.simulate.recorded import measured_seconds, recorded_workload
from gyre.simulate.simulation import Plan, Simulation
from gyre.simulate.workload import Workload
from tests.simulate.tiny import tiny

STATED_ERROR = 0.03


def recipe_of(workload: Workload, mode: str, folder: Path) -> Recipe:
    path = folder / "recipe.toml"
    path.write_text(
        f"""
        name = "recorded"
        model = {{ path = "model" }}
        tasks = {{ path = "tasks" }}
        sandbox = {{ per_node = 1000 }}
        rollout = {{ executions_per_cell = {workload.cells.executions_per_cell}, engine = "reference" }}
        group = {{ executions = {workload.group.executions}, groups_per_step = {workload.group.groups_per_step} }}
        train = {{ steps = {workload.steps} }}
        cells = {{ count = {workload.cells.count}, gpus_per_node = 0 }}
        [schedule]
        mode = "{mode}"
        steps_per_burst = {workload.schedule.steps_per_burst}
        lead_steps = {workload.schedule.lead_steps}
        """
    )
    return load_recipe(path, folders=False, local=True)


def run_of(mode: str, *settings: str) -> tuple[Workload, Simulation]:
    """A simulated run stands for a real one: its folded lines are all that is read."""
    workload = tiny("cells.latency=0.2", "cells.executions_per_cell=24", *settings)
    return workload, Simulation(workload, Drawn(workload, 11), Plan(mode)).run()


@pytest.mark.parametrize("mode", ["elastic", "colocate", "async"])
def test_a_run_predicts_its_own_time(mode: str, tmp_path: Path) -> None:
    workload, run = run_of(mode)
    read, groups = recorded_workload(run.state, recipe_of(workload, mode, tmp_path), "run")
    again = Simulation(read, Recorded(groups), Plan(mode)).run()
    assert measured_seconds(run.state) == pytest.approx(run.seconds, abs=1.0)  # the first lineage opens before
    assert again.seconds == pytest.approx(run.seconds, rel=STATED_ERROR)
    # twice that of orders, as for a scheduler that polls; the simulated one hears of facts at once
    assert read.cells.latency == pytest.approx(0.4, abs=0.02) or mode == "async"


def test_a_run_predicts_another_modes_time(tmp_path: Path) -> None:
    workload, run = run_of("elastic")
    read, groups = recorded_workload(run.state, recipe_of(workload, "elastic", tmp_path), "run")
    predicted = Simulation(read, Recorded(groups), Plan("colocate")).run().seconds
    assert predicted == pytest.approx(run_of("colocate")[1].seconds, rel=STATED_ERROR)


def test_a_run_without_a_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no step yet"):
        recorded_workload(RunState(), recipe_of(tiny("cells.executions_per_cell=24"), "elastic", tmp_path), "run")
