"""The batch script: pure rendering, so in the default tier."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from gyre.errors import UserError
from gyre.launch.slurm_script import Program, gpu_nodes, render
from gyre.launch.slurm_steps import guard, program, srun
from gyre.recipe.load import load_recipe
from gyre.recipe.schema import Recipe

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Program("/env/bin/python", Path("/runs/short-001"), Path("/runs/short-001/launch/code"))
TWO_NODES = ("cells.nodes_per_cell=2", "train.data_parallel=2")


def recipe(*settings: str) -> Recipe:
    return load_recipe(ROOT / "recipes" / "short.toml", ["slurm.cpu.nodes=2", *settings], local=False)


def components(script: str) -> list[list[str]]:
    """The options of each component."""
    found: list[list[str]] = [[]]
    for line in script.splitlines():
        if line == "#SBATCH hetjob":
            found.append([])
        elif line.startswith("#SBATCH "):
            found[-1].append(line.removeprefix("#SBATCH "))
    return found


def test_the_script_of_a_site_that_sets_nothing_reads_like_this() -> None:
    assert (
        render(recipe(), PROGRAM)
        == """\
#!/bin/bash
# gyre run short-001; component 0: CPU nodes (scheduler, processor, a worker a node); component 1: GPU nodes (cells)
# engine 0: node 0 of its cell, CPU
#SBATCH --job-name=gyre-short-001
#SBATCH --output=/runs/short-001/launch/job-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR2@600
#SBATCH --nodes=2
#SBATCH --ntasks=2
#SBATCH --no-kill
#SBATCH hetjob
#SBATCH --nodes=2
#SBATCH --ntasks=2
#SBATCH --no-kill

export PYTHONPATH=/runs/short-001/launch/code
export PYTHONSAFEPATH=1
exec /env/bin/python -m gyre.launch.slurm_job --run /runs/short-001
"""
    )


def test_every_setting_of_a_site_is_in_the_script() -> None:
    script = render(
        recipe(
            "slurm.account=lab",
            "slurm.qos=high",
            "slurm.reservation=may",
            "slurm.requeue=false",
            "slurm.signal_before_end=5m",
            'slurm.cpu={partition="cpu", nodes=3, time="1-00:00:00", mem="0", constraint="avx512&ib"}',
            'slurm.gpu={partition="h200", time="12:00:00", extra=["--exclusive", "--switches=1"]}',
            'slurm.prologue=["module load cuda"]',
            'slurm.container=["apptainer", "exec", "--nv", "/shared/my gyre.sif"]',
            "cells.gpus_per_node=8",
            "train.data_parallel=8",
        ),
        PROGRAM,
    )
    cpu, gpu = components(script)
    assert set(cpu) >= {
        "--partition=cpu",
        "--nodes=3",
        "--ntasks=3",
        "--time=1-00:00:00",
        "--mem=0",
        "--constraint='avx512&ib'",
        "--no-requeue",
        "--signal=B:USR2@300",
    }
    assert set(gpu) >= {"--partition=h200", "--gres=gpu:8", "--time=12:00:00", "--exclusive", "--switches=1"}
    for options in (cpu, gpu):
        assert set(options) >= {"--account=lab", "--qos=high", "--reservation=may", "--no-kill"}
    lines = script.splitlines()
    assert lines.index("module load cuda") < next(i for i, line in enumerate(lines) if line.startswith("exec "))
    assert "exec apptainer exec --nv '/shared/my gyre.sif' /env/bin/python -m gyre.launch.slurm_job" in script


def test_gres_of_the_site_comes_before_the_default() -> None:
    _, gpu = components(
        render(recipe("cells.gpus_per_node=8", "train.data_parallel=8", "slurm.gpu.gres=gpu:h200:8"), PROGRAM)
    )
    assert [option for option in gpu if option.startswith("--gres")] == ["--gres=gpu:h200:8"]


def test_a_path_with_a_space_stays_one_word() -> None:
    script = render(recipe(), Program("/my env/python", Path("/my runs/r"), None))
    assert "#SBATCH --output='/my runs/r/launch/job-%j.log'" in script
    assert "exec '/my env/python' -m gyre.launch.slurm_job --run '/my runs/r'" in script
    assert "PYTHONPATH" not in script


@pytest.mark.parametrize(
    ("settings", "words"),
    [(("slurm.gpu.nodes=3",), "3 nodes for 2 cells"), ((*TWO_NODES, "slurm.gpu.nodes=3"), "2 cells of 2 nodes")],
)
def test_what_cannot_be_placed_is_refused_by_its_key(settings: tuple[str, ...], words: str) -> None:
    with pytest.raises(UserError, match=f"slurm.gpu.nodes: .*{words}"):
        render(recipe(*settings), PROGRAM)


def test_a_cell_takes_as_many_nodes_as_the_recipe_says() -> None:
    _, gpu = components(render(recipe(*TWO_NODES), PROGRAM))
    assert {"--nodes=4", "--ntasks=4"} <= set(gpu)
    _, shared = components(render(recipe(*TWO_NODES, "slurm.gpu.nodes=2"), PROGRAM))
    assert "--nodes=2" in shared
    designed = load_recipe(ROOT / "tests" / "recipe" / "designed.toml", folders=False)
    assert gpu_nodes(designed) == 6 * 4


def test_each_step_runs_in_the_container_and_its_process_in_the_same() -> None:
    container = ["apptainer", "exec", "image.sif"]
    argv = program(Path("/runs/r"), "cell-1")
    made = srun("cell-1", "gpu2", guard(container, Path("/runs/r"), "cell-1", Path("/log"), ["cpu1"], argv, 1), 1)
    assert made[0] == "srun"
    assert made[made.index("apptainer") :][:4] == [*container, sys.executable]
    assert made[made.index("--") + 1 :] == argv
    assert "apptainer" not in argv


def test_the_job_runs_the_snapshot_though_it_starts_in_the_checkout(tmp_path: Path) -> None:
    package = tmp_path / "code" / "gyre"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    script = render(recipe(), Program(sys.executable, tmp_path / "run", tmp_path / "code"))
    exports = [line for line in script.splitlines() if line.startswith("export ")]
    look = shlex.join([sys.executable, "-c", "import gyre; print(gyre.__file__)"])
    done = subprocess.run(
        ["bash", "-c", "\n".join([*exports, look])], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(package / "__init__.py")
