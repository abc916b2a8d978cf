"""The settings that decide what is trained from recorded turns.

Owns the choice of recipe keys that this room reads. Invariant: with equal settings and an equal journalled
order, the micro-steps are equal, so nothing outside this struct may influence them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gyre.errors import UserError
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

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> Settings:
        """Raises `UserError` for `trajectory.packing = "tree"`, which this version cannot lay out."""
        if recipe.trajectory.packing != "paths":
            raise UserError('trajectory.packing: "tree" is not available in this version; set it to "paths"')
        return cls(
            seed=recipe.seed,
            tokens_per_microstep=recipe.train.tokens_per_microstep,
            max_paths=recipe.trajectory.max_paths,
            min_targets=recipe.trajectory.min_targets,
            selection=recipe.trajectory.selection,
            advantage=recipe.objective.advantage,
            std_floor=recipe.objective.std_floor,
            min_graded=recipe.group.min_graded,
        )
