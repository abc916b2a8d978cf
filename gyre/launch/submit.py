"""Submission: from a recipe to a run folder that any launcher can start.

Owns what is frozen at submission. Invariant: everything that can be wrong with a recipe, its model and its tasks is
found here, before anything starts; a folder that exists is never taken over.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gyre
from gyre.engines.sglang.install import interpreter
from gyre.engines.sglang.store import master_program
from gyre.errors import UserError
from gyre.executions.harnesses import find_harness, refuse_instruction
from gyre.executions.images.store import recipe_images
from gyre.executions.rewards import find_reward
from gyre.executions.steps import parts
from gyre.executions.tasks import Task, load_tasks
from gyre.launch.model import resolve_model
from gyre.ledger.files import write_atomic
from gyre.ledger.job import Job, agents_of, write_job
from gyre.ledger.journal import create_index
from gyre.ledger.layout import RunFolder, runs_home
from gyre.recipe import schema
from gyre.recipe.load import dump_toml, load_recipe
from gyre.recipe.schema import Recipe
from gyre.recipe.units import format_seconds
from gyre.training.architecture import read_architecture
from gyre.training.place import Layout
from gyre.trajectory.settings import packing_notice

GUESTS = 8
"""Cells that may join a run under Slurm at a time, beyond the recipe's own."""


@dataclass(frozen=True)
class Plan:
    """What a submission would start."""

    recipe: Recipe
    tasks: list[str]
    eval_tasks: list[str]
    workers: list[str]
    cells: list[str]
    stores: list[str]

    @property
    def processes(self) -> list[str]:
        nodes = self.recipe.cells.nodes_per_cell
        cells = [name for cell in self.cells for name in (cell, *agents_of(cell, nodes))]
        return ["scheduler", "processor", *self.stores, *self.workers, *cells]


def plan(recipe_path: Path, overrides: list[str], local: bool = True) -> Plan:
    """Read and check a recipe and its tasks. Raises UserError."""
    recipe = load_recipe(recipe_path, overrides, local=local)
    refuse_unbuilt(recipe)
    harness = find_harness(recipe.harness.name)
    images = recipe_images(recipe.sandbox)
    loaded = load_tasks(Path(recipe.tasks.path), images=images)
    loaded_held_out = load_tasks(Path(recipe.eval.path), images=images) if recipe.eval.path else []
    for task in (*loaded, *loaded_held_out):
        refuse_long(recipe.tasks, task)
        refuse_instruction(harness, task)
    tasks, held_out = ([task.name for task in some] for some in (loaded, loaded_held_out))
    both = set(tasks) & set(held_out)
    if both and recipe.train.steps:
        raise UserError(
            f"eval.path: task {sorted(both)[0]} is in tasks.path too; held-out tasks have names of their own"
        )
    workers = recipe.local.workers if local else recipe.slurm.cpu.nodes
    return Plan(
        recipe=recipe,
        tasks=tasks,
        eval_tasks=held_out,
        workers=[f"worker-{index}" for index in range(workers)],
        cells=[f"cell-{index}" for index in range(recipe.cells.count)],
        stores=["store"] if recipe.rollout.store_mb else [],
    )


def refuse_long(settings: schema.Tasks, task: Task) -> None:
    """A task whose steps may take longer than an execution has: it would end excluded. Raises UserError."""
    needed = sum(
        min(settings.harness_timeout, part.task.agent_timeout or settings.harness_timeout)
        + settings.grader_attempts * min(settings.grader_timeout, part.task.verifier_timeout)
        for part in parts(task)
    )
    if task.steps and needed > settings.execution_timeout:
        raise UserError(
            f"tasks.execution_timeout: {format_seconds(settings.execution_timeout)} is shorter than the"
            f" {len(task.steps)} steps of task {task.name}, each of harness_timeout plus {settings.grader_attempts} x"
            f" grader_timeout or the task's own: it must be {format_seconds(needed)} or more"
        )


def refuse_unbuilt(recipe: Recipe) -> None:
    """What the recipe may say and this version does not do. Raises UserError naming the key."""
    refusals = {
        'trajectory.record = "wire": this version records turns and routing': "wire" in recipe.trajectory.record,
        f'sandbox.network = "{recipe.sandbox.network}": this version has "proxy" only': recipe.sandbox.network
        != "proxy",
    }
    for refusal, applies in refusals.items():
        if applies:
            raise UserError(refusal)
    find_reward(recipe.tasks.reward or "file")
    if recipe.rollout.engine == "sglang" and not recipe.rollout.python:
        interpreter()
    if recipe.rollout.store_mb:
        master_program()


def create_run(planned: Plan, launcher: str, now: float, say: Callable[[str], None], name: str = "") -> RunFolder:
    """Make the run folder with everything frozen in it. A model that is to be built is built now, or by the job."""
    run = RunFolder(runs_home() / (name or free_name(planned.recipe.name)))
    if run.path.exists():  # said before a model is built for minutes
        raise run.taken()
    if notice := packing_notice(planned.recipe):
        say(notice)
    model = resolve_model(planned.recipe.model, planned.recipe.seed, say, build=launcher == "local")
    if (model / "config.json").exists():
        architecture = read_architecture(model)
        Layout.of(planned.recipe.train).check(architecture)
        if "routing" in planned.recipe.trajectory.record:
            architecture.mixture()
    run.create()
    try:
        _freeze(run, planned, launcher, now, model)
    except BaseException:
        shutil.rmtree(run.path, ignore_errors=True)  # half a folder would be taken for a run
        raise
    return run


def _freeze(run: RunFolder, planned: Plan, launcher: str, now: float, model: Path) -> None:
    write_atomic(run.recipe, dump_toml(planned.recipe).encode())
    job = Job(
        launcher=launcher,
        code=gyre.__version__,
        created=now,
        model=str(model),
        workers=planned.workers,
        cells=planned.cells,
        nodes_per_cell=planned.recipe.cells.nodes_per_cell,
        stores=planned.stores,
        guests=guests(planned) if launcher == "slurm" else [],
        tasks=planned.tasks,
        eval_tasks=planned.eval_tasks,
    )
    for writer in job.writers():
        create_index(run, writer)
    write_job(run, job)


def guests(planned: Plan) -> list[str]:
    """Names of cells that other jobs may start later."""
    first = len(planned.cells)
    return [f"cell-{index}" for index in range(first, first + GUESTS)]


def free_name(name: str) -> str:
    """The recipe's name with the next free number: quickstart-001."""
    home = runs_home()
    pattern = re.compile(re.escape(name) + r"-(\d+)")
    taken = [int(match[1]) for path in home.glob(f"{name}-*") if (match := pattern.fullmatch(path.name))]
    return f"{name}-{max(taken, default=0) + 1:03d}"
