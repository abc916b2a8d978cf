"""The recipes for a real cluster, as far as a login node gets: what `gyre submit --dry-run` prints of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gyre.recipe.check import burst_executions, check_recipe, serving_cells
from gyre.recipe.load import load_recipe

ROOT = Path(__file__).resolve().parents[2]
TASKS = ROOT / "recipes" / "tasks"


def dry_run(recipe: str, tmp_path: Path, tasks: str, *settings: str) -> subprocess.CompletedProcess[str]:
    """With what a site brings: a model, its tasks and images, an installed harness and engine."""
    (tmp_path / "model").mkdir(exist_ok=True)
    (tmp_path / "images").mkdir(exist_ok=True)
    brought = (f"model.path={tmp_path / 'model'}", f"tasks.path={TASKS / tasks}", f"eval.path={TASKS / 'held-out'}")
    words = [
        word for setting in (*brought, "rollout.python=/usr/bin/python3", *settings) for word in ("--set", setting)
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GYRE_RUNS": str(tmp_path / "runs")}
    command = [sys.executable, "-m", "gyre.cli.main", "submit", str(ROOT / "recipes" / recipe), "--dry-run", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("recipe", "tasks", "settings", "cpu_nodes", "gpu_nodes"),
    [
        ("terminalbench.toml", "terminal-bench", ("sandbox.images=",), 8, 6),
        ("nl2repo.toml", "nl2repo", (), 4, 4),
    ],
)
def test_its_job(
    tmp_path: Path, recipe: str, tasks: str, settings: tuple[str, ...], cpu_nodes: int, gpu_nodes: int
) -> None:
    done = dry_run(recipe, tmp_path, tasks, *settings)
    assert done.returncode == 0, done.stderr
    cpu, _, gpu = done.stdout.partition("#SBATCH hetjob")
    assert f"--nodes={cpu_nodes}\n" in cpu and "--partition=cpu\n" in cpu
    assert f"--nodes={gpu_nodes}\n" in gpu and "--partition=h200\n" in gpu
    assert not (tmp_path / "runs").exists()


def test_an_image_that_is_not_there_is_said_before_anything_is_submitted(tmp_path: Path) -> None:
    done = dry_run("terminalbench.toml", tmp_path, "terminal-bench", f"sandbox.images={tmp_path / 'images'}")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "is not in" in done.stderr and "sum-lines: image" in done.stderr


@pytest.mark.parametrize("recipe", ["terminalbench.toml", "nl2repo.toml"])
def test_bursts_fit_and_budgets_add_up(recipe: str) -> None:
    found = load_recipe(ROOT / "recipes" / recipe, folders=False)
    assert check_recipe(found, local=False) is None
    assert found.sandbox.per_node * found.slurm.cpu.nodes >= burst_executions(found)
    assert serving_cells(found) * found.rollout.executions_per_cell >= burst_executions(found)
    grading = found.tasks.grader_timeout * found.tasks.grader_attempts
    assert found.tasks.execution_timeout >= found.tasks.harness_timeout + grading
    if found.tasks.interrupted == "grade":  # what is cut must be graded before the job ends
        assert found.slurm.signal_before_end >= found.tasks.grader_timeout / 2
