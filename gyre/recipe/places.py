"""Where a recipe places what it asks for. Pure.

Invariants: it follows from the recipe alone, so that a cell's lead and its agents find the same; a GPU is one engine's;
an engine that fits in a node lies in one.
"""

from __future__ import annotations

from dataclasses import dataclass

from gyre.recipe.schema import Recipe


@dataclass(frozen=True)
class EnginePlace:
    """An engine of a cell: the cell's nodes that it lies on, and its GPUs on each of them (none on CPU). Both count
    from 0; the first of the nodes is where it is asked."""

    engine: int = 0
    nodes: range = range(1)
    gpus: range = range(0)


def engine_places(recipe: Recipe) -> list[EnginePlace]:
    """The engines of a cell, for a recipe that `check_recipe` lets pass: as many as it asks for, or as its GPUs carry.

    Without GPUs there is one unless the recipe asks for more; one is spread evenly over the nodes, where its ranks can
    be, and more are spread by whole engines.
    """
    cells, tensor, wanted = recipe.cells, recipe.rollout.tensor_parallel, recipe.rollout.engines_per_cell
    nodes, gpus = cells.nodes_per_cell, cells.gpus_per_node
    if not gpus:
        if wanted <= 1:
            return [EnginePlace(0, range(nodes if tensor % nodes == 0 else 1))]
        firsts = [engine * nodes // wanted for engine in range(wanted)]
        return [EnginePlace(engine, range(node, node + 1)) for engine, node in enumerate(firsts)]
    count = wanted or max(1, nodes * gpus // tensor)
    if tensor > gpus:
        span = tensor // gpus
        return [EnginePlace(engine, range(engine * span, (engine + 1) * span), range(gpus)) for engine in range(count)]
    places = []
    for engine in range(count):
        node, at = divmod(engine, gpus // tensor)
        places.append(EnginePlace(engine, range(node, node + 1), range(at * tensor, (at + 1) * tensor)))
    return places


def engine_nodes(recipe: Recipe) -> int:
    """Over how many nodes of its cell an engine lies."""
    return len(engine_places(recipe)[0].nodes)


def describe_engines(recipe: Recipe) -> list[str]:
    """A line for each engine of a cell: where it lies."""
    lines = []
    for place in engine_places(recipe):
        nodes = f"node {place.nodes[0]}" if len(place.nodes) == 1 else f"nodes {place.nodes[0]}-{place.nodes[-1]}"
        gpus = f", GPUs {place.gpus[0]}-{place.gpus[-1]}" if place.gpus else ", CPU"
        lines.append(f"engine {place.engine}: {nodes} of its cell{gpus}")
    return lines
