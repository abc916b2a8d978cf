"""Where a recipe places what it asks for. Pure; invariant: it follows from the recipe alone."""

from __future__ import annotations

from gyre.recipe.schema import Recipe


def engine_nodes(recipe: Recipe) -> int:
    """Over how many nodes of its cell an engine lies. Without GPUs its ranks are spread evenly, where they can be."""
    cells, tensor = recipe.cells, recipe.rollout.tensor_parallel
    if cells.gpus_per_node:
        return max(1, tensor // cells.gpus_per_node)
    return cells.nodes_per_cell if tensor % cells.nodes_per_cell == 0 else 1
