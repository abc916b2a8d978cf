"""Settings of the small world: plain ones, and drawn ones."""

from __future__ import annotations

import random
from typing import Any

from gyre.scheduling.settings import Settings

from .world import Faults

PLAIN: dict[str, Any] = {
    "seed": 1,
    "mode": "elastic",
    "executions": 2,
    "groups_per_step": 2,
    "min_graded": 1,
    "steps": 3,
    "steps_per_burst": 1,
    "lead_steps": 0,
    "max_overtake": 4,
    "cell_room": 4,
    "training_cells": 1,
    "cells": ("cell-0", "cell-1"),
    "workers": ("worker-0",),
    "attempts": 3,
    "microsteps_per_grant": 1,
    "checkpoint_every": 1,
    "phase_timeout": 20.0,
    "tasks": ("a", "b", "c"),
}


def make(cells: int = 2, **changes: Any) -> Settings:
    return Settings(**{**PLAIN, "cells": tuple(f"cell-{i}" for i in range(cells)), **changes})


def draw(rng: random.Random, mode: str | None = None) -> Settings:
    """Small ones of every kind."""
    cells = rng.randint(1, 5)
    mode = mode or rng.choice(["elastic", "elastic", "colocate", "async"])
    if mode == "async":
        cells = max(2, cells)
    return make(
        cells,
        mode=mode,
        seed=rng.randint(1, 9),
        executions=rng.randint(1, 4),
        groups_per_step=rng.randint(1, 3),
        min_graded=rng.randint(1, 2),
        steps=rng.randint(1, 4),
        steps_per_burst=rng.randint(1, 3),
        lead_steps=rng.randint(0, 2),
        max_overtake=rng.choice([0, 1, 4]),
        cell_room=rng.randint(1, 8),
        training_cells=rng.randint(1, max(1, cells - 1)),
        workers=tuple(f"worker-{i}" for i in range(rng.randint(1, 2))),
        attempts=rng.randint(2, 3),
        microsteps_per_grant=rng.randint(1, 2),
        checkpoint_every=rng.randint(1, 3),
        eval_every=rng.choice([0, 0, 1, 2]),
        eval_tasks=("x",),
    )


def draw_faults(rng: random.Random) -> Faults:
    return Faults(
        kill=rng.choice([0.0, 0.01, 0.05]),
        hang=rng.choice([0.0, 0.01, 0.03]),
        refuse=rng.choice([0.0, 0.5]),
        budget=rng.randint(1, 8),
        only=rng.choice([(), (), ("cell",), ("cell-0",), ("cell-1", "cell-2")]),
    )


def draw_training(rng: random.Random) -> tuple[Settings, Faults]:
    """Runs in which training takes long, so that satellites share it, and cells fail in the midst of it."""
    settings = make(
        rng.randint(2, 3),
        executions=2,
        groups_per_step=rng.randint(2, 4),
        cell_room=8,
        steps=rng.randint(2, 4),
        steps_per_burst=rng.randint(1, 2),
        lead_steps=rng.randint(0, 1),
        microsteps_per_grant=1,
        checkpoint_every=rng.randint(1, 3),
        phase_timeout=60.0,
    )
    faults = Faults(kill=0.015, hang=0.015, refuse=0.5, budget=4, only=("cell",))
    return settings, faults
