"""Where a cell's engines lie: no GPU twice, whole engines, in one node if they fit."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, strategies as st

from gyre.recipe.check import check_recipe
from gyre.recipe.places import EnginePlace, describe_engines, engine_places
from gyre.recipe.schema import Cells, Group, Local, Model, Recipe, Rollout, Tasks, Train


def recipe(nodes: int, gpus: int, tensor: int, wanted: int = 0, executions: int = 1000) -> Recipe:
    return Recipe(
        name="r",
        model=Model(path="/m"),
        tasks=Tasks(path="t"),
        rollout=Rollout(tensor_parallel=tensor, engines_per_cell=wanted, executions_per_cell=executions),
        group=Group(executions=2, groups_per_step=1),
        train=Train(steps=1, data_parallel=max(1, nodes * gpus)),
        cells=Cells(count=1, nodes_per_cell=nodes, gpus_per_node=gpus),
        local=Local(workers=1),
    )


def refusal(asked: Recipe) -> str:
    problem = check_recipe(asked)
    return ".".join(problem[0]) if problem is not None else ""


@given(st.integers(1, 6), st.integers(1, 12), st.integers(1, 72), st.integers(0, 80))
def test_on_gpus(nodes: int, gpus: int, tensor: int, wanted: int) -> None:
    asked = recipe(nodes, gpus, tensor, wanted)
    refused = refusal(asked)
    fits = (nodes * gpus) % tensor == 0 and (gpus % tensor == 0 or tensor % gpus == 0)
    if not fits:
        assert refused == "rollout.tensor_parallel"
    elif wanted * tensor > nodes * gpus:
        assert refused == "rollout.engines_per_cell"
    if not fits or wanted * tensor > nodes * gpus:
        return
    assert not refused.startswith("rollout.tensor") and not refused.startswith("rollout.engines")
    places = engine_places(asked)
    assert [place.engine for place in places] == list(range(wanted or nodes * gpus // tensor))
    used = Counter((node, gpu) for place in places for node in place.nodes for gpu in place.gpus)
    assert set(used.values()) == {1}, "a GPU of two engines"
    assert all(node < nodes and gpu < gpus for node, gpu in used)
    for place in places:
        assert len(place.nodes) * len(place.gpus) == tensor
        assert len(place.nodes) == 1 or tensor > gpus, "it would fit in a node"
    if not wanted:
        assert len(used) == nodes * gpus, "a GPU is idle in rollout"


@given(st.integers(1, 5), st.integers(1, 8), st.integers(0, 9))
def test_on_cpu(nodes: int, tensor: int, wanted: int) -> None:
    """One engine, spread evenly where it can be, unless more are asked for: those lie within nodes, spread evenly."""
    places = engine_places(recipe(nodes, 0, tensor, wanted))
    assert [place.engine for place in places] == list(range(max(1, wanted)))
    assert not any(place.gpus for place in places)
    if wanted <= 1:
        assert places[0].nodes == range(nodes if tensor % nodes == 0 else 1)
        return
    on = Counter(node for place in places for node in place.nodes)
    assert places[0].nodes == range(1)
    assert on.total() == wanted and max(on) < nodes
    assert max(on.values()) - min(on.values()) <= (0 if wanted % nodes == 0 else 1)


def test_the_designed_cell_has_an_engine_a_node() -> None:
    places = engine_places(recipe(4, 8, 8))
    assert places == [EnginePlace(node, range(node, node + 1), range(8)) for node in range(4)]
    assert describe_engines(recipe(2, 8, 4))[3] == "engine 3: node 1 of its cell, GPUs 4-7"
    assert describe_engines(recipe(4, 8, 16))[1] == "engine 1: nodes 2-3 of its cell, GPUs 0-7"
    assert describe_engines(recipe(1, 0, 1)) == ["engine 0: node 0 of its cell, CPU"]


def test_more_engines_than_executions_are_refused() -> None:
    problem = check_recipe(recipe(1, 0, 1, wanted=5, executions=4))
    assert problem is not None
    assert problem[0] == ("rollout", "engines_per_cell")
    assert problem[1].startswith("5 engines for 4 executions")
    assert refusal(recipe(1, 0, 1, wanted=4, executions=4)) == ""
