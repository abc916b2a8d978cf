"""The settings that decide what is trained from recorded turns.

Owns the choice of recipe keys that this room reads. Invariant: with equal settings and an equal journalled
order, the micro-steps are equal, so nothing outside this struct may influence them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gyre.recipe.schema import Recipe


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Each field is the recipe key of the same name; `tokens_per_microstep` bounds a path as well."""

    seed: int
    tokens_per_microstep: int
    max_paths: int = 5
    min_targets: int = 1
    selection: Literal["default", "paper"] = "default"
    advantage: Literal["mean", "mean_std", "leave_one_out"] = "mean_std"
    std_floor: float = 1e-4
    min_graded: int = 2
    packing: Literal["paths", "tree"] = "paths"

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> Settings:
        """As the recipe says, but for `packing` where the layout allows only paths (see `packing_notice`)."""
        return cls(
            seed=recipe.seed,
            tokens_per_microstep=recipe.train.tokens_per_microstep,
            max_paths=recipe.trajectory.max_paths,
            min_targets=recipe.trajectory.min_targets,
            selection=recipe.trajectory.selection,
            advantage=recipe.objective.advantage,
            std_floor=recipe.objective.std_floor,
            min_graded=recipe.group.min_graded,
            packing="paths" if packing_notice(recipe) else recipe.trajectory.packing,
        )


def packing_notice(recipe: Recipe) -> str:
    """Why this recipe's trees are trained as paths, in one line; empty when they are not, or none are asked for."""
    if recipe.trajectory.packing == "tree" and recipe.train.context_parallel > 1:
        return (
            f"trajectory.packing: train.context_parallel = {recipe.train.context_parallel} splits sequences over"
            " ranks, which a tree's mask does not allow; paths are packed instead"
        )
    return ""
