"""Impossible recipes: refused before anything is submitted, with the key and the reason.

Owns the rules. Each gives (key, reason) for what it refuses. Invariant: `check_recipe` is pure; only `check_folders`
looks at the disk.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from gyre.recipe.keys import Key
from gyre.recipe.places import engine_nodes
from gyre.recipe.schema import Recipe
from gyre.recipe.units import format_seconds

Problem = tuple[Key, str]

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


def check_recipe(recipe: Recipe, local: bool | None = None) -> Problem | None:
    """The first thing that makes the recipe impossible, or None. `local` as in `load_recipe`."""
    for problem in (
        *_names(recipe),
        *_steps(recipe),
        *_times(recipe),
        *_room(recipe, local),
        *_tokens(recipe),
        *_cells(recipe, local),
        *_training_layout(recipe),
        *_rollout_layout(recipe),
    ):
        return problem
    return None


def workers(recipe: Recipe, local: bool | None) -> int:
    """How many workers run executions: [local] workers on one machine, else one a CPU node; the more for None."""
    if local is None:
        return max(recipe.local.workers, recipe.slurm.cpu.nodes)
    return recipe.local.workers if local else recipe.slurm.cpu.nodes


def burst_executions(recipe: Recipe) -> int:
    """What is outstanding at most: (phi + mu) * B groups of N executions."""
    schedule, group = recipe.schedule, recipe.group
    return (schedule.lead_steps + schedule.steps_per_burst) * group.groups_per_step * group.executions


def serving_cells(recipe: Recipe) -> int:
    """Cells that can serve rollouts at a burst's opening."""
    reserved = recipe.schedule.training_cells if recipe.schedule.mode == "async" else 0
    return recipe.cells.count - reserved


def _names(recipe: Recipe) -> Iterator[Problem]:
    if not _RUN_NAME.fullmatch(recipe.name):
        yield ("name",), f"{recipe.name!r} becomes a folder's name: use letters, digits, - and _"
    if bool(recipe.model.path) == bool(recipe.model.build):
        yield ("model", "path"), "set either model.path (a folder) or model.build (a script that makes it)"
    if not recipe.tasks.path:
        yield ("tasks", "path"), "name a folder of tasks"


def _steps(recipe: Recipe) -> Iterator[Problem]:
    if recipe.train.steps == 0 and not recipe.eval.path:
        yield ("train", "steps"), "0 steps only evaluate, and eval.path names no tasks"


def _times(recipe: Recipe) -> Iterator[Problem]:
    tasks = recipe.tasks
    grading = tasks.grader_timeout * tasks.grader_attempts
    if tasks.execution_timeout < tasks.harness_timeout + grading:
        yield (
            ("tasks", "execution_timeout"),
            f"{format_seconds(tasks.execution_timeout)} is shorter than harness_timeout"
            f" {format_seconds(tasks.harness_timeout)} plus {tasks.grader_attempts} x grader_timeout"
            f" {format_seconds(tasks.grader_timeout)}: it must be"
            f" {format_seconds(tasks.harness_timeout + grading)} or more",
        )


def _room(recipe: Recipe, local: bool | None) -> Iterator[Problem]:
    needed = burst_executions(recipe)
    reason = (
        f"a burst dispatches up to (lead_steps {recipe.schedule.lead_steps} + steps_per_burst"
        f" {recipe.schedule.steps_per_burst}) x groups_per_step {recipe.group.groups_per_step} x executions"
        f" {recipe.group.executions} = {needed} executions"
    )
    count = workers(recipe, local)
    if count == 0:
        yield ("slurm", "cpu", "nodes"), "0 nodes, so no worker runs executions: set it, or gyre submit --local"
    if (slots := recipe.sandbox.per_node * count) < needed:
        yield (
            ("sandbox", "per_node"),
            f"{count} workers x {recipe.sandbox.per_node} = {slots} slots, but {reason}",
        )
    if recipe.sandbox.images and recipe.sandbox.kind == "process":
        yield ("sandbox", "images"), 'sandbox.kind = "process" has the host\'s system only: leave this out'
    cells = serving_cells(recipe)
    if cells > 0 and (room := cells * recipe.rollout.executions_per_cell) < needed:
        yield (
            ("rollout", "executions_per_cell"),
            f"{cells} serving cells x {recipe.rollout.executions_per_cell} = room for {room}, but {reason}",
        )


def _tokens(recipe: Recipe) -> Iterator[Problem]:
    if recipe.rollout.context > recipe.train.tokens_per_microstep:
        yield (
            ("rollout", "context"),
            f"{recipe.rollout.context} tokens do not fit into a micro-step: raise train.tokens_per_microstep"
            f" ({recipe.train.tokens_per_microstep}) or lower this",
        )
    if recipe.group.min_graded > recipe.group.executions:
        yield (
            ("group", "min_graded"),
            f"more than group.executions ({recipe.group.executions}): every group is void",
        )
    if min(recipe.objective.clip) <= 0:
        yield ("objective", "clip"), f"both widths must be above 0, got {list(recipe.objective.clip)}"


def _cells(recipe: Recipe, local: bool | None) -> Iterator[Problem]:
    schedule, cells = recipe.schedule, recipe.cells
    if local and cells.nodes_per_cell > 1 and cells.gpus_per_node:
        yield (
            ("cells", "nodes_per_cell"),
            f"{cells.nodes_per_cell} nodes with GPUs of their own, but here is one machine: set it to 1, or submit to"
            " Slurm",
        )
    if schedule.mode == "async" and schedule.training_cells >= recipe.cells.count:
        yield (
            ("schedule", "training_cells"),
            f"{schedule.training_cells} of {recipe.cells.count} cells train always, so none serves: use fewer",
        )


def _training_layout(recipe: Recipe) -> Iterator[Problem]:
    train, cells = recipe.train, recipe.cells
    factors = (
        ("tensor_parallel", train.tensor_parallel),
        ("pipeline_parallel", train.pipeline_parallel),
        ("context_parallel", train.context_parallel),
        ("data_parallel", train.data_parallel),
    )
    ranks = train.ranks
    product = " x ".join(f"{name} {factor}" for name, factor in factors)
    if train.context_parallel > 1:
        yield (
            ("train", "context_parallel"),
            "the attention (segments and trees, without Transformer Engine) computes whole sequences: set it to 1",
        )
    if train.sequence_parallel and train.tensor_parallel == 1:
        yield ("train", "sequence_parallel"), "true needs tensor_parallel above 1: those ranks split the sequence"
    if train.routing_replay and "routing" not in recipe.trajectory.record:
        yield ("train", "routing_replay"), 'replays what was recorded: add "routing" to trajectory.record, or use false'
    gpus = cells.nodes_per_cell * cells.gpus_per_node
    if gpus and ranks != gpus:
        yield (
            ("train", "tensor_parallel"),
            f"{product} = {ranks} ranks, but a cell has {cells.nodes_per_cell} nodes x {cells.gpus_per_node} GPUs"
            f" = {gpus}",
        )
    if not gpus and ranks % cells.nodes_per_cell:
        yield (
            ("cells", "nodes_per_cell"),
            f"{ranks} ranks ({product}) do not divide over {cells.nodes_per_cell} nodes",
        )
    stage = ranks // train.pipeline_parallel
    if stage % train.expert_parallel:
        yield (
            ("train", "expert_parallel"),
            f"{train.expert_parallel} does not divide the {stage} ranks of a pipeline stage",
        )


def _rollout_layout(recipe: Recipe) -> Iterator[Problem]:
    key: Key = ("rollout", "tensor_parallel")
    rollout, cells = recipe.rollout, recipe.cells
    tensor = rollout.tensor_parallel
    for name, parts in (("data_parallel", rollout.data_parallel), ("expert_parallel", rollout.expert_parallel)):
        if tensor % parts:
            yield ("rollout", name), f"{parts} does not divide the engine's {tensor} ranks (rollout.tensor_parallel)"
    if rollout.engine == "reference" and tensor > 1:
        yield key, "the reference engine runs on one device: use 1"
    if rollout.engine == "reference" and rollout.store_mb:
        yield ("rollout", "store_mb"), 'the reference engine has no store of KV pages: use 0, or engine = "sglang"'
    if "routing" in recipe.trajectory.record:
        record: Key = ("trajectory", "record")
        if rollout.store_mb:
            # SGLang keeps experts by slot of KV; a page from the store has those of what its slot held before
            yield record, '"routing" is wrong for what comes from the store: drop it, or set rollout.store_mb to 0'
    if rollout.weights == "mooncake":
        yield from _written_weights(recipe)
    if (engines := rollout.engines_per_cell) > rollout.executions_per_cell:
        few = f"{engines} engines for {rollout.executions_per_cell} executions (rollout.executions_per_cell): use fewer"
        yield ("rollout", "engines_per_cell"), few
    if cells.gpus_per_node == 0:
        return
    gpus = cells.nodes_per_cell * cells.gpus_per_node
    if gpus % tensor:
        yield key, f"{tensor} does not divide a cell's {gpus} GPUs"
    elif cells.gpus_per_node % tensor and tensor % cells.gpus_per_node:
        yield key, f"an engine of {tensor} GPUs covers part of a node of {cells.gpus_per_node}: use a divisor"
    elif engines * tensor > gpus:
        room = f"{engines} engines of {tensor} GPUs (rollout.tensor_parallel) do not fit into a cell's {gpus}"
        yield ("rollout", "engines_per_cell"), f"{room}: use {gpus // tensor}, or 0 for as many as fit"


def _written_weights(recipe: Recipe) -> Iterator[Problem]:
    """What stands against writing into engines' memory: another engine, and layouts whose places are not known."""
    rollout = recipe.rollout
    if rollout.engine == "reference":
        yield ("rollout", "weights"), 'the reference engine takes tensors only: use "shared"'
    for name, parts in (("data_parallel", rollout.data_parallel), ("expert_parallel", rollout.expert_parallel)):
        if parts > 1:
            yield ("rollout", "weights"), f'"mooncake" knows no engines with rollout.{name} = {parts}: use "shared"'
    if engine_nodes(recipe) > 1:
        yield ("rollout", "weights"), '"mooncake" knows no engines over several nodes: use "shared"'
    if rollout.store_mb and recipe.cells.gpus_per_node:
        yield (
            ("rollout", "weights"),
            '"mooncake" writes by TCP, and the store of KV pages (rollout.store_mb) wants RDMA on GPUs; an engine has'
            ' one of them: use "shared", or store_mb = 0',
        )


def check_folders(recipe: Recipe) -> Problem | None:
    """The first file or folder of the recipe that is not there, or None."""
    wanted = (
        (("model", "path"), recipe.model.path, "folder"),
        (("model", "build"), recipe.model.build, "file"),
        (("tasks", "path"), recipe.tasks.path, "folder"),
        (("eval", "path"), recipe.eval.path, "folder"),
        (("sandbox", "images"), recipe.sandbox.images, "folder"),
        (("rollout", "python"), recipe.rollout.python, "file"),
    )
    for key, name, kind in wanted:
        if not name:
            continue
        path = Path(name)
        if not (path.is_dir() if kind == "folder" else path.is_file()):
            state = f"is not a {kind}" if path.exists() else "does not exist"
            return key, f"{name} {state} (relative paths start at the recipe's folder)"
    return None
