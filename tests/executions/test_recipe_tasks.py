"""The tasks of the recipes: the tree is what the script writes, and each task grades its solution 1 and nothing 0."""

from __future__ import annotations

import filecmp
import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gyre.executions.check import check_task, check_tasks
from gyre.executions.grading import grade
from gyre.executions.tasks import load_task, load_tasks

TASKS = Path(__file__).parents[2] / "recipes/tasks"
FOLDERS = sorted(path.parent for path in TASKS.glob("*/*/task.toml"))


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    specification = importlib.util.spec_from_file_location("generate_tasks", TASKS / "generate.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["generate_tasks"] = module
    specification.loader.exec_module(module)
    return module


def test_the_script_writes_the_tree(generate: ModuleType, tmp_path: Path) -> None:
    generate.main(tmp_path)
    for folder in generate.SETS:
        names = sorted(str(path.relative_to(tmp_path)) for path in (tmp_path / folder).rglob("*"))
        assert names == sorted(str(path.relative_to(TASKS)) for path in (TASKS / folder).rglob("*"))
        files = [name for name in names if (tmp_path / name).is_file()]
        _, different, errors = filecmp.cmpfiles(tmp_path, TASKS, files, shallow=False)
        assert different + errors == []
        assert [n for n in files if ((tmp_path / n).stat().st_mode ^ (TASKS / n).stat().st_mode) & 0o100] == []


def test_the_sets(generate: ModuleType) -> None:
    sets = generate.generate_sets()
    assert (len(sets["quickstart"]), len(sets["held-out"])) == (72, 18)
    everything = [item for tasks in sets.values() for item in tasks]
    assert len({task.instruction for _, task in everything}) == len({name for name, _ in everything}) == 90
    for tasks in sets.values():
        assert {task.kind for _, task in tasks} == set(generate.KINDS)


def test_all_load(generate: ModuleType) -> None:
    for folder, tasks in generate.generate_sets().items():
        loaded = {task.name: task.instruction for task in load_tasks(TASKS / folder)}
        assert loaded == {name: task.instruction for name, task in tasks}


def test_generate_task_is_seeded_and_takes_a_kind(generate: ModuleType) -> None:
    for kind in generate.KINDS:
        one, two = (generate.generate_task(random.Random(7), kind) for _ in range(2))
        assert one == two
        assert one.kind == kind
        assert one.output in one.instruction
        assert one.output in one.command
    assert {generate.generate_task(random.Random(seed)).kind for seed in range(60)} == set(generate.KINDS)


async def assert_good(lab: Any, folder: Path) -> None:
    check = await check_task(load_task(folder), lab.sandbox, lab.root, lab.limits)
    assert (check.solution, check.untouched, check.problems) == (1.0, 0.0, ())


@pytest.mark.parametrize("folder", FOLDERS[::8], ids=lambda folder: folder.name)
async def test_solution_and_untouched(lab: Any, folder: Path) -> None:
    await assert_good(lab, folder)


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
async def test_every_solution_and_untouched(lab: Any, folder: Path) -> None:
    await assert_good(lab, folder)


@pytest.mark.parametrize("kind", ["create", "count", "sort", "upper", "head", "uniq"])
async def test_wrong_answers_earn_nothing(lab: Any, generate: ModuleType, kind: str) -> None:
    """Another name, a text that lacks its last letter, and a link to the right text."""
    spec = generate.generate_task(random.Random(3), kind)
    generate.write_task(lab.folder / kind, spec)
    task = load_task(lab.folder / kind)
    for number, command in enumerate(
        [
            spec.command.replace(spec.output, "other.txt"),
            f"printf '{spec.expected[:-1]}' > {spec.output}",
            f"printf '{spec.expected}' > link; ln -s link {spec.output}",
        ]
    ):
        _, _, snapshot = await lab.run(command, task=task)
        result = await grade(task, lab.sandbox, lab.root, snapshot, lab.folder / f"grading-{number}", lab.limits)
        assert result.reward == 0.0, command


async def test_check_tasks_says_what_is_wrong(lab: Any) -> None:
    lab.task(name="a-good")
    lab.task(name="b-gives", test_sh="#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n")
    lab.task(name="c-breaks", test_sh="#!/bin/bash\n")
    folder = lab.task(name="d-unsolved").folder
    (folder / "solution/solve.sh").unlink()
    seen: list[str] = []
    checks = await check_tasks(
        folder.parent, lab.sandbox, lab.root, lab.limits, done=lambda check: seen.append(check.name)
    )
    assert [check.name for check in checks] == sorted(seen) == ["a-good", "b-gives", "c-breaks", "d-unsolved"]
    assert [check.good for check in checks] == [True, False, False, False]
    assert checks[1].problems == ("an untouched workspace earns 1, not 0",)
    assert [problem.partition(":")[0] for problem in checks[2].problems] == ["untouched", "solved"]
    assert "solution/solve.sh is missing" in checks[3].problems[0]
