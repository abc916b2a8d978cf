"""What the decisions need to know of the recipe, and the arithmetic of steps, bursts and versions.

Owns `Settings`. Invariant: burst b (from 1) covers steps (b - 1) * mu + 1 .. b * mu; version v is the weights after
burst v, so `version(step) = ceil(step / mu)`. One more burst, without training, carries the last evaluation.
"""

from __future__ import annotations

from dataclasses import dataclass

from gyre.recipe.schema import Recipe


@dataclass(frozen=True)
class Settings:
    seed: int
    mode: str
    executions: int
    """N: executions of a group."""
    groups_per_step: int
    """B"""
    min_graded: int
    steps: int
    steps_per_burst: int
    """mu"""
    lead_steps: int
    """phi"""
    max_overtake: int
    cell_room: int
    """C_e: executions that a serving cell carries."""
    training_cells: int
    cells: tuple[str, ...]
    """In order, the core first."""
    workers: tuple[str, ...]
    attempts: int
    microsteps_per_grant: int
    checkpoint_every: int
    phase_timeout: float
    tasks: tuple[str, ...]
    eval_tasks: tuple[str, ...] = ()
    eval_every: int = 0
    eval_samples: int = 1
    difference_limit: float = 0.0
    """Largest spread between trainer and engine; 0: any."""
    grade_interrupted: bool = False
    """Does the end of a job wait for what runs to be graded as it stands?"""

    def version(self, step: int) -> int:
        return -(-step // self.steps_per_burst)

    def burst_of(self, step: int) -> int:
        """The burst that trains `step` (steps count from 1)."""
        return -(-step // self.steps_per_burst)

    def first_step(self, burst: int) -> int:
        return (burst - 1) * self.steps_per_burst + 1

    def boundary(self, burst: int) -> int:
        """The step whose weights rollout serves during `burst`: the last one before it."""
        return min((max(1, burst) - 1) * self.steps_per_burst, self.steps)

    def only_trains(self, cell: str) -> bool:
        """Async: is it one of the fixed set that trains, and never rolls out?"""
        return self.mode == "async" and cell in self.cells[: self.training_cells]

    @property
    def bursts(self) -> int:
        """Bursts with training in them."""
        return self.burst_of(self.steps)


def settings_of(
    recipe: Recipe,
    workers: tuple[str, ...],
    tasks: tuple[str, ...],
    eval_tasks: tuple[str, ...],
    guests: tuple[str, ...] = (),
) -> Settings:
    """`guests`: cells that may join the recipe's own, and never lead."""
    return Settings(
        seed=recipe.seed,
        mode=recipe.schedule.mode,
        executions=recipe.group.executions,
        groups_per_step=recipe.group.groups_per_step,
        min_graded=recipe.group.min_graded,
        steps=recipe.train.steps,
        steps_per_burst=recipe.schedule.steps_per_burst,
        lead_steps=recipe.schedule.lead_steps,
        max_overtake=recipe.schedule.max_overtake,
        cell_room=recipe.rollout.executions_per_cell,
        training_cells=recipe.schedule.training_cells,
        cells=(*(f"cell-{index}" for index in range(recipe.cells.count)), *guests),
        workers=workers,
        attempts=recipe.tasks.attempts,
        grade_interrupted=recipe.tasks.interrupted == "grade",
        microsteps_per_grant=recipe.train.bundle,
        checkpoint_every=recipe.train.checkpoint_every,
        phase_timeout=recipe.schedule.phase_timeout,
        tasks=tasks,
        eval_tasks=eval_tasks,
        eval_every=recipe.eval.every if eval_tasks else 0,
        eval_samples=recipe.eval.samples,
        difference_limit=recipe.objective.difference_limit,
    )
