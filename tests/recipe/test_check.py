"""Impossible recipes are refused with the key and the reason; possible ones at the same edge are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre.errors import UserError
from gyre.recipe.check import burst_executions, check_recipe, serving_cells, workers
from gyre.recipe.load import load_recipe
from gyre.recipe.schema import Recipe

TERMINALBENCH = Path(__file__).parent / "designed.toml"


def load(*overrides: str) -> Recipe:
    return load_recipe(TERMINALBENCH, overrides, folders=False)


def refused(key: str, reason: str, *overrides: str) -> None:
    with pytest.raises(UserError) as caught:
        load(*overrides)
    message = str(caught.value)
    assert f" {key}: " in message and reason in message


def test_what_a_burst_needs() -> None:
    recipe = load()
    assert burst_executions(recipe) == (1 + 1) * 16 * 16
    assert workers(recipe, local=False) == workers(recipe, local=None) == 8
    assert workers(recipe, local=True) == 1
    assert serving_cells(recipe) == 6
    assert serving_cells(load("schedule.mode=async", "cells.count=8", "schedule.training_cells=2")) == 6


def test_times() -> None:
    edge = ("tasks.harness_timeout=1h", "tasks.grader_timeout=10m", "tasks.grader_attempts=3")
    load(*edge, "tasks.execution_timeout=90m")
    refused("tasks.execution_timeout", "must be 90m or more", *edge, "tasks.execution_timeout=89m")


def test_worker_slots() -> None:
    load("slurm.cpu.nodes=16", "sandbox.per_node=32")
    refused("sandbox.per_node", "8 workers x 63 = 504 slots", "sandbox.per_node=63")


def test_a_local_run_counts_its_own_workers() -> None:
    problem = check_recipe(load(), local=True)
    assert problem is not None and problem[0] == ("sandbox", "per_node") and "1 workers x 64" in problem[1]


def test_a_cluster_run_needs_cpu_nodes() -> None:
    problem = check_recipe(load("slurm.cpu.nodes=0", "sandbox.per_node=512"), local=False)
    assert problem is not None and problem[0] == ("slurm", "cpu", "nodes")


def test_rollout_room() -> None:
    load("rollout.executions_per_cell=86")
    refused("rollout.executions_per_cell", "room for 510", "rollout.executions_per_cell=85")
    refused("rollout.executions_per_cell", "5 serving cells x 96 = room for 480", "schedule.mode=async")


def test_context_fits_a_micro_step() -> None:
    load("rollout.context=1024", "train.tokens_per_microstep=1024")
    refused("rollout.context", "1025 tokens", "rollout.context=1025", "train.tokens_per_microstep=1024")


def test_async_leaves_a_cell_to_serve() -> None:
    refused("schedule.training_cells", "none serves", "schedule.mode=async", "schedule.training_cells=6")


def test_training_layout() -> None:
    load("train.tensor_parallel=4", "train.data_parallel=2")
    refused("train.tensor_parallel", "16 ranks, but a cell has 4 nodes x 8 GPUs", "train.tensor_parallel=4")
    refused("train.expert_parallel", "3 does not divide the 8 ranks", "train.expert_parallel=3")
    refused("train.context_parallel", "computes whole sequences", "train.context_parallel=2", "train.tensor_parallel=4")
    load("train.sequence_parallel=true")
    refused(
        "train.sequence_parallel",
        "needs tensor_parallel above 1",
        "train.sequence_parallel=true",
        "train.tensor_parallel=1",
        "train.data_parallel=8",
    )


def test_layouts_without_gpus() -> None:
    cpu = (
        "cells.gpus_per_node=0",
        "rollout.tensor_parallel=1",
        "train.tensor_parallel=2",
        "train.pipeline_parallel=1",
        "train.expert_parallel=1",
    )
    load(*cpu, "cells.nodes_per_cell=2")
    assert check_recipe(load(*cpu, "cells.nodes_per_cell=2", "local.workers=8"), local=True) is None
    problem = check_recipe(load("local.workers=8"), local=True)
    assert problem is not None and problem[0] == ("cells", "nodes_per_cell") and "one machine" in problem[1]
    refused("cells.nodes_per_cell", "2 ranks", *cpu, "cells.nodes_per_cell=3")
    load(*cpu, "cells.nodes_per_cell=1", "rollout.tensor_parallel=2")


def test_rollout_layout() -> None:
    load("rollout.tensor_parallel=4")
    load("rollout.tensor_parallel=16")
    refused("rollout.tensor_parallel", "does not divide a cell's 32 GPUs", "rollout.tensor_parallel=24")
    refused("rollout.tensor_parallel", "reference engine", "rollout.engine=reference")
    small = ("rollout.engine=reference", "rollout.tensor_parallel=1", "train.routing_replay=false")
    refused("rollout.store_mb", "reference engine", *small, "rollout.store_mb=64")
    routed = 'trajectory.record=["routing"]'
    load(routed)
    load(*small, routed)
    refused("trajectory.record", "set rollout.store_mb to 0", routed, "rollout.store_mb=64")
    refused("train.routing_replay", 'add "routing" to trajectory.record', "train.routing_replay=true")
    load(routed, "train.routing_replay=true")
    refused("rollout.weights", "reference engine", *small, "rollout.weights=mooncake")
    load("rollout.tensor_parallel=4", "rollout.data_parallel=2", "rollout.expert_parallel=4")
    refused("rollout.data_parallel", "3 does not divide", "rollout.tensor_parallel=4", "rollout.data_parallel=3")
    refused("rollout.expert_parallel", "8 does not divide", "rollout.tensor_parallel=4", "rollout.expert_parallel=8")


def test_one_source_of_the_model() -> None:
    refused("model.path", "either", "model.build=tiny/build.py")
    refused("model.path", "either", "model.path=")
    load("model.path=", "model.build=tiny/build.py")


@pytest.mark.parametrize("name", ["", "a b", "../x", ".hidden", "a/b"])
def test_names_that_are_no_folder(name: str) -> None:
    refused("name", "becomes a folder's name", f"name='{name}'")


def test_small_contradictions() -> None:
    refused("group.min_graded", "every group is void", "group.min_graded=17")
    refused("objective.clip", "above 0", "objective.clip=[0.0, 0.1]")
    refused("tasks.path", "name a folder", "tasks.path=")
