"""An emulated run: the scheduler, processor, workers, proxies and harnesses of a real one, with paced cells.

Owns how a workload becomes a run folder: tasks, recipe, pace. Invariant: every mode is given the same executions, group
by group: a task of its own for each group, and the same seed for their order.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path

from gyre.launch.local import Supervisor
from gyre.launch.submit import create_run, plan
from gyre.ledger import events as ev
from gyre.ledger.layout import RunFolder
from gyre.processes.children import Child
from gyre.recipe.load import load_recipe
from gyre.recipe.toml import dump_table
from gyre.simulate.jobs import Drawn
from gyre.simulate.paced.pace import Pace
from gyre.simulate.workload import Workload

GRADER = """#!/bin/bash
read -r index <job
echo $((index % 2)) >"${GYRE_ROOT:-}/logs/verifier/reward.txt"
"""
"""Rewards within a group differ, so that every group trains."""
TURNS = 3
GENERATION = 0.6
FILLERS = 20
CONTEXT = 640
TOKENS = 250
"""About what an execution's path has: training is paced by the tokens that there really are."""
MODULES = {"cell": "gyre.simulate.paced.cell"}


@dataclass(frozen=True)
class Emulation:
    """`factor`: how much faster everything goes than in the workload. `model`: the recipe's table for it."""

    workload: Workload
    factor: float
    model: dict[str, object]
    seed: int = 0

    def prepare(self, folder: Path, mode: str, split: int = 1) -> RunFolder:
        """A run folder below GYRE_RUNS, its tasks and recipe in `folder`."""
        tasks, path = folder / "tasks", folder / f"{mode}.toml"
        if not tasks.exists():
            for number in range(self.workload.groups):
                write_task(tasks / name_of(number))
        path.write_text(dump_table(self._recipe(mode, split, tasks)))
        run = create_run(plan(path, []), "local", time.time(), lambda line: None, mode)
        self._pace().write(run.path)
        return run

    def _pace(self) -> Pace:
        workload, factor = self.workload, self.factor
        cells, training, jobs = workload.cells, workload.training, Drawn(workload, self.seed)
        return Pace(
            to_training=cells.to_training / factor,
            to_rollout=cells.to_rollout / factor,
            refresh=cells.refresh / factor,
            optimizer=training.optimizer / factor,
            merge=training.merge / factor,
            token=training.work / TOKENS / factor,
            turns=TURNS,
            generation=GENERATION,
            fillers=FILLERS,
            jobs={name_of(n): [job.seconds / factor for job in jobs.group(n)] for n in range(workload.groups)},
        )

    def _recipe(self, mode: str, split: int, tasks: Path) -> dict[str, object]:
        workload, schedule, group = self.workload, self.workload.schedule, self.workload.group
        burst = (schedule.steps_per_burst + schedule.lead_steps) * group.groups_per_step * group.executions
        # the jobs are cut already: what a busy machine adds must not cut them again
        timeout = workload.executions.timeout / self.factor + 1200.0
        return {
            "name": "emulated",
            "seed": 1,
            "model": {**self.model, "dtype": "float32"},
            "tasks": {
                "path": str(tasks),
                "harness_timeout": timeout,
                "grader_timeout": 120.0,
                "execution_timeout": timeout + 1200.0,
            },
            "harness": {"name": "shell", "max_turns": TURNS + 1, "max_tokens": 256},
            "sandbox": {"kind": "bubblewrap", "per_node": burst},
            "rollout": {
                "engine": "reference",
                "context": CONTEXT,
                "executions_per_cell": workload.cells.executions_per_cell,
            },
            "group": {"executions": group.executions, "groups_per_step": group.groups_per_step},
            "schedule": {
                "mode": mode,
                "steps_per_burst": schedule.steps_per_burst,
                "lead_steps": schedule.lead_steps,
                "max_overtake": schedule.max_overtake,
                "training_cells": split,
            },
            "train": {
                "steps": workload.steps,
                "tokens_per_microstep": max(
                    CONTEXT, round(TOKENS * workload.training.microstep / workload.training.work)
                ),
                "checkpoint_every": workload.steps,
            },
            "cells": {"count": workload.cells.count, "gpus_per_node": 0},
            "local": {"liveness": 60.0, "restarts": 0},
        }


class PacedSupervisor(Supervisor):
    """The local launcher, with paced cells."""

    async def _spawn(self, name: str, argv: list[str]) -> Child:
        module = MODULES.get(name.partition("-")[0])
        return await super()._spawn(name, [sys.executable, "-m", module, *argv[3:]] if module else argv)


async def emulate(run: RunFolder) -> ev.EndState:
    """The run, to its end."""
    supervisor = PacedSupervisor(run, load_recipe(run.recipe, folders=False))
    state = await supervisor.supervise()
    if state != "finished":
        raise RuntimeError(f"{run.name} ended {state}: {supervisor.failure}")
    return state


def name_of(number: int) -> str:
    return f"paced-{number:04d}"


def write_task(folder: Path) -> None:
    """A task whose instruction is its name: the engine knows the rest."""
    for name, text in {
        "instruction.md": f"Pace {folder.name}.\n",
        "task.toml": 'schema_version = "1.0"\n',
        "environment/Dockerfile": "FROM debian:12-slim\nWORKDIR /app\n",
        "tests/test.sh": GRADER,
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "tests/test.sh").chmod(0o755)
