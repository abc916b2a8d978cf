"""Bad input: one clear line on stderr, exit code 2, no run folder, no traceback."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.chaos.harness import RECIPE, ROOT, gyre

SET = "--set"


def submit(home: Path, recipe: Path, *arguments: str) -> str:
    """Submit what must be refused; the one line that says why, without "gyre: "."""
    done = subprocess.run(
        gyre("submit", str(recipe), "--local", *arguments),
        cwd=ROOT,
        env={**os.environ, "GYRE_RUNS": str(home)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("gyre: ")
    assert not home.exists() or not list(home.iterdir()), "a run folder was left"
    return lines[0].removeprefix("gyre: ")


def test_a_recipe_that_cannot_be_read(tmp_path: Path) -> None:
    home, absent = tmp_path / "runs", tmp_path / "absent.toml"
    assert submit(home, absent) == f"cannot read the recipe {absent}: No such file or directory"
    torn = tmp_path / "torn.toml"
    torn.write_text("name = \n")
    assert submit(home, torn).startswith(f"{torn}: not TOML: Invalid value (at line 1")
    torn.write_bytes(b"name = '\xff\xfe'\n")
    assert submit(home, torn) == f"cannot read the recipe {torn}: it is not UTF-8 text"


def test_an_unknown_key_names_the_nearest(tmp_path: Path) -> None:
    home, recipe = tmp_path / "runs", tmp_path / "recipe.toml"
    text = RECIPE.read_text()
    recipe.write_text(text.replace("learning_rate =", "learning_rat ="))
    line = next(n for n, row in enumerate(recipe.read_text().splitlines(), 1) if row.startswith("learning_rat"))
    why = submit(home, recipe)
    assert why == f"{recipe} line {line}: train.learning_rat: unknown key: did you mean train.learning_rate?"
    assert submit(home, RECIPE, SET, "train.stepz=3").startswith(
        "--set: train.stepz: unknown key: did you mean train.st"
    )


def test_a_wrong_type_names_the_key(tmp_path: Path) -> None:
    why = submit(tmp_path / "runs", RECIPE, SET, "train.steps=many")
    assert why.startswith("--set: train.steps: expected int")


def test_a_missing_model_folder(tmp_path: Path) -> None:
    home = tmp_path / "runs"
    why = submit(home, RECIPE, SET, f"model.path={tmp_path / 'no-model'}", SET, 'model.build=""')
    assert why.startswith("--set: model.path: ")
    assert "no-model" in why
    (tmp_path / "empty").mkdir()
    why = submit(home, RECIPE, SET, f"model.path={tmp_path / 'empty'}", SET, 'model.build=""')
    assert "config.json" in why


def test_tasks_that_are_not_whole(tmp_path: Path) -> None:
    home, tasks = tmp_path / "runs", tmp_path / "tasks"
    first = sorted((ROOT / "recipes/tasks/quickstart").iterdir())[0]
    shutil.copytree(first, tasks / first.name)
    (tasks / first.name / "tests" / "test.sh").unlink()
    why = submit(home, RECIPE, SET, f"tasks.path={tasks}")
    assert str(tasks / first.name) in why
    assert "tests/test.sh" in why
    shutil.rmtree(tasks / first.name)
    assert str(tasks) in submit(home, RECIPE, SET, f"tasks.path={tasks}")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("tasks.execution_timeout=10s", "tasks.execution_timeout"),
        ("rollout.context=4096", "tokens_per_microstep"),
        ("sandbox.per_node=2", "sandbox.per_node"),
        ("rollout.executions_per_cell=2", "rollout.executions_per_cell"),
    ],
)
def test_impossible_combinations(tmp_path: Path, setting: str, words: str) -> None:
    assert words in submit(tmp_path / "runs", RECIPE, SET, setting)


def test_a_name_that_is_taken_is_not_taken_over(tmp_path: Path) -> None:
    home = tmp_path / "runs"
    (home / "mine").mkdir(parents=True)
    (home / "mine" / "keep").write_text("this")
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (model / name).write_text("{}")
    done = subprocess.run(
        gyre("submit", str(RECIPE), "--local", "--name", "mine", SET, f"model.path={model}", SET, 'model.build=""'),
        cwd=ROOT,
        env={**os.environ, "GYRE_RUNS": str(home)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "exists already" in done.stderr
    assert [path.name for path in (home / "mine").iterdir()] == ["keep"]


@pytest.mark.parametrize("absent", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_model_folder_that_lacks_a_part(tmp_path: Path, absent: str) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name in {"config.json", "model.safetensors", "tokenizer.json"} - {absent}:
        (model / name).write_text("{}")
    words = submit(tmp_path / "runs", RECIPE, SET, f"model.path={model}", SET, 'model.build=""')
    assert "model.path" in words
    assert absent.removeprefix("model") in words
