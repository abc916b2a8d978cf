"""What a trainer rank needs to know of the recipe.

Owns the defaults for use without a recipe. Invariant: two ranks with equal settings, weights and micro-steps
compute the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gyre.recipe.schema import Recipe


@dataclass(frozen=True)
class TrainSettings:
    """Numbers as in the recipe's tables [model], [objective] and [train]."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    objective: Literal["gspo", "grpo", "cispo", "tis"] = "gspo"
    clip: tuple[float, float] = (3e-4, 4e-4)
    weight_decay: float = 0.0
    adam_betas: tuple[float, float] = (0.9, 0.95)
    adam_eps: float = 1e-8
    gradient_clip: float = 1.0
    targets_per_chunk: int = 8192
    """Rows for which logits exist at a time; more are computed in chunks, again in the backward pass."""

    @classmethod
    def of(cls, recipe: Recipe) -> TrainSettings:
        return cls(
            dtype=recipe.model.dtype,
            objective=recipe.objective.name,
            clip=recipe.objective.clip,
            weight_decay=recipe.train.weight_decay,
            adam_betas=recipe.train.adam_betas,
            adam_eps=recipe.train.adam_eps,
            gradient_clip=recipe.train.gradient_clip,
        )


def learning_rate(step: int, peak: float, warmup_steps: int) -> float:
    """Linear warmup, then constant. `step` counts optimizer steps from 0; the last warmup step has the
    peak."""
    if step < 0:
        raise ValueError("step must not be negative")
    return peak * min(1.0, (step + 1) / warmup_steps) if warmup_steps > 0 else peak
