"""What a trainer rank needs to know of the recipe.

Owns the defaults for use without a recipe. Invariant: two ranks with equal settings, weights and micro-steps
compute the same bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from gyre.recipe.schema import Recipe, Train


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


def learning_rate(step: int, train: Train) -> float:
    """Linear warm-up to the peak, which the last warm-up step has; then constant, or down to `decay_to` of the peak,
    which the last step of the run has. `step` counts optimizer steps from 0."""
    if step < 0:
        raise ValueError("step must not be negative")
    if step < train.warmup_steps:
        return train.learning_rate * (step + 1) / train.warmup_steps
    left = train.steps - max(train.warmup_steps, 1)
    gone = min(1.0, (step + 1 - max(train.warmup_steps, 1)) / left) if left > 0 else 0.0
    shares = {"constant": 1.0, "linear": 1.0 - gone, "cosine": 0.5 * (1.0 + math.cos(math.pi * gone))}
    return train.learning_rate * (train.decay_to + (1.0 - train.decay_to) * shares[train.decay])
