"""The three entry points, from a package that is installed apart from gyre."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = ROOT / "recipes" / "plugin"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which the example package is installed."""
    built, target = tmp_path_factory.mktemp("built"), tmp_path_factory.mktemp("installed")
    for file in PLUGIN.iterdir():  # a build leaves files beside the source
        if file.is_file():
            (built / file.name).write_bytes(file.read_bytes())
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(target), str(built)], check=True, capture_output=True)
    path = os.pathsep.join(filter(None, (str(target), str(ROOT), os.environ.get("PYTHONPATH", ""))))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def gyre(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "gyre.cli.main", *arguments]
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=False, cwd=ROOT)


def test_its_tasks_are_checked_with_its_reward(environment: dict[str, str]) -> None:
    done = gyre(environment, "tasks", "check", str(PLUGIN / "tasks"), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    (check,) = json.loads(done.stdout)
    assert (check["name"], check["solution"], check["untouched"]) == ("capital", 1.0, 0.0)


def test_without_it_they_are_no_tasks(environment: dict[str, str]) -> None:
    without = {**environment, "PYTHONPATH": str(ROOT)}
    done = gyre(without, "tasks", "check", str(PLUGIN / "tasks"))
    assert done.returncode == 1
    assert "not a task of a known format (harbor, terminal-bench, nl2repo)" in done.stdout
    assert (done.stdout.count("\n"), done.stderr) == (2, "")


@pytest.mark.slow
def test_its_harness_runs_and_its_reward_is_recorded(environment: dict[str, str], tmp_path: Path, cache: Path) -> None:
    env = {**environment, "GYRE_RUNS": str(tmp_path), "GYRE_CACHE": str(cache)}
    settings = ("harness.name=one-call", "eval.every=1", f"eval.path={PLUGIN / 'tasks'}", "train.steps=0")
    words = [word for setting in settings for word in ("--set", setting)]
    done = gyre(env, "submit", "recipes/short.toml", "--local", "--name", "plugin", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = gyre(env, "status", "plugin", "--json")
    (evaluation,) = json.loads(shown.stdout)["evals"]
    assert evaluation["executions"] == 1
    assert 0 <= evaluation["score"] < 1  # the tiny model knows no capitals, and its answer was compared


def test_they_are_checked_in_the_sandbox_that_is_named(environment: dict[str, str]) -> None:
    done = gyre(environment, "tasks", "check", str(PLUGIN / "tasks"), "--kind", "tent")
    assert done.returncode == 2
    assert done.stderr == "gyre: tent is no kind of sandbox: bubblewrap, apptainer, enroot or process\n"
