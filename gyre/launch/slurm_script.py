"""The batch script of a run: one heterogeneous job, rendered to be read.

Pure. Invariant: every option of both components is written out, in a fixed order; nothing is left to what Slurm
carries over from one component to the next (facts: mem, time, signal, requeue, no-kill and output are carried over,
nodes and partitions are not), and `--ntasks` is always there, since newer versions start on one node without it.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gyre.errors import UserError
from gyre.recipe.places import describe_engines
from gyre.recipe.schema import Recipe, Slurm, SlurmComponent

CPU_GROUP, GPU_GROUP = 0, 1
LEAST_MINUTES = 1


@dataclass(frozen=True)
class Program:
    """What the batch script runs, and where: interpreter, the run folder, and a snapshot of the package if there is
    one."""

    python: str
    run: Path
    code: Path | None


def job_name(run: Path) -> str:
    return f"gyre-{run.name}"


def gpu_nodes(recipe: Recipe) -> int:
    """Nodes of component 1. Raises UserError for a number that whole cells do not fill."""
    cells = recipe.cells
    wanted = cells.count * cells.nodes_per_cell
    nodes = recipe.slurm.gpu.nodes or wanted
    if nodes > wanted or nodes % cells.nodes_per_cell:
        each = "" if cells.nodes_per_cell == 1 else f" of {cells.nodes_per_cell} nodes"
        raise UserError(
            f"slurm.gpu.nodes: {nodes} nodes for {cells.count} cells{each}: leave it out, or lower it to a"
            f" multiple of {cells.nodes_per_cell}"
        )
    return nodes


def render(recipe: Recipe, program: Program) -> str:
    """The batch script of a run: CPU nodes with scheduler, processor and workers, then GPU nodes with the cells."""
    slurm = recipe.slurm
    cpu = [*_job_options(slurm, program.run), *_component(slurm.cpu, slurm.cpu.nodes, ""), *_site(slurm)]
    gpu = [*_component(slurm.gpu, gpu_nodes(recipe), default_gres(recipe)), *_site(slurm)]
    about = "component 0: CPU nodes (scheduler, processor, a worker a node); component 1: GPU nodes (cells)"
    about += "".join(f"\n{line}" for line in describe_engines(recipe))
    return _script(f"gyre run {program.run.name}; {about}", [cpu, gpu], slurm, program, "slurm_job", [])


def default_gres(recipe: Recipe) -> str:
    return f"gpu:{recipe.cells.gpus_per_node}" if recipe.cells.gpus_per_node else ""


def render_guests(recipe: Recipe, program: Program, names: list[str], on_gpu: bool, partition: str, time: str) -> str:
    """The script of a job that gives a run a node for each of these processes: of one component alone."""
    slurm = recipe.slurm
    own = slurm.gpu if on_gpu else slurm.cpu
    component = msgspec.structs.replace(own, partition=partition or own.partition, time=time or own.time)
    gres = default_gres(recipe) if on_gpu else ""
    options = [*_job_options(slurm, program.run), *_component(component, len(names), gres), *_site(slurm)]
    about = f"nodes for processes of gyre run {program.run.name}: {', '.join(names)}"
    return _script(about, [options], slurm, program, "slurm_guest", ["--names", ",".join(names)])


def _script(
    about: str,
    components: list[list[str]],
    slurm: Slurm,
    program: Program,
    module: str,
    arguments: list[str],
) -> str:
    lines = ["#!/bin/bash", *(f"# {line}" for line in about.splitlines())]
    for index, options in enumerate(components):
        lines += ["#SBATCH hetjob"] if index else []
        lines += [f"#SBATCH {option}" for option in options]
    lines += ["", *slurm.prologue]
    if program.code is not None:
        # safe path: or `python -m` would look first in the folder that the job was submitted from, perhaps the checkout
        lines += [f"export PYTHONPATH={shlex.quote(str(program.code))}", "export PYTHONSAFEPATH=1"]
    command = [*slurm.container, program.python, "-m", f"gyre.launch.{module}", "--run", str(program.run), *arguments]
    # exec: the signal before the end goes to the batch script's own process, which is then ours
    lines += [f"exec {shlex.join(command)}", ""]
    return "\n".join(lines)


def _job_options(slurm: Slurm, run: Path) -> list[str]:
    """What holds for the whole job: Slurm takes it from the first component."""
    return [
        f"--job-name={job_name(run)}",
        f"--output={_quoted(run / 'launch' / 'job-%j.log')}",
        "--open-mode=append",
        "--requeue" if slurm.requeue else "--no-requeue",
        f"--signal=B:USR2@{int(slurm.signal_before_end)}",
    ]


def _component(component: SlurmComponent, nodes: int, gres: str) -> list[str]:
    options = {
        "partition": component.partition,
        "nodes": str(nodes),
        "ntasks": str(nodes),
        "gres": component.gres or gres,
        "constraint": component.constraint,
        "mem": component.mem,
        "time": component.time,
    }
    return [
        *(f"--{name}={_quoted(value)}" for name, value in options.items() if value),
        "--no-kill",
        *component.extra,
    ]


def _site(slurm: Slurm) -> list[str]:
    options = {"account": slurm.account, "qos": slurm.qos, "reservation": slurm.reservation}
    return [f"--{name}={_quoted(value)}" for name, value in options.items() if value]


def _quoted(value: str | Path) -> str:
    """sbatch reads a #SBATCH line as a shell would."""
    return shlex.quote(str(value))
