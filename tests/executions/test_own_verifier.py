"""Verifiers in environments of their own: which one a task's or a step's is, what it holds, and its limits."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from gyre.executions.check import check_tasks
from gyre.executions.execution import CallReport
from gyre.executions.grading import FAILED, GRADED, grade
from gyre.executions.images.prepare import prepare_images
from gyre.executions.images.store import Images
from gyre.executions.limits import MIB
from gyre.executions.tasks import load_task
from tests.executions.image_lab import Entry, layer, layer_of, write_oci
from tests.executions.test_steps import ByStep, played, written

BASE = "FROM small:1\nWORKDIR /app\n"
OWN = 'artifacts = ["out.txt"]\n[verifier]\nuser = "judge"\n[verifier.environment]\n{}\n'
JUDGE = """#!/bin/bash
[[ $(cat /etc/which-system) == verifier && $(cat /app/out.txt) == hello && $(id -u) == 77 && -z $LEVEL ]] && r=1 || r=0
[[ -e /app/extra ]] && r=0
echo $r >/logs/verifier/reward.txt
"""


def verifiers_image(lab: Any, system: Path, *more: Entry) -> Images:
    """`small:1` for the agent, and `judge:1`, which has a user and says that it is the verifier's."""
    folder = lab.folder / "images"
    folder.mkdir(exist_ok=True)
    own = layer(("etc/which-system", "verifier\n"), ("etc/passwd", "judge:x:77:78::/home/judge:/bin/bash\n"), *more)
    write_oci(folder / "small_1.tar", [layer_of(system)], {"User": "0"}, how="")
    write_oci(folder / "judge_1.tar", [layer_of(system), own], {"WorkingDir": "/app"}, how="")
    return Images(folder)


@pytest.mark.parametrize("how", ["docker_image", "tests/Dockerfile", "tests in the image"])
async def test_a_verifier_has_an_image_of_its_own(lab: Any, system: Path, cache: Path, how: str) -> None:
    images = verifiers_image(lab, system, *([("tests/test.sh", JUDGE)] if how == "tests in the image" else []))
    toml = OWN.format("" if how == "tests/Dockerfile" else 'docker_image = "judge:1"')
    folder = lab.task(toml="", name="graded", dockerfile=BASE + "ENV LEVEL=1\n", test_sh=JUDGE).folder
    (folder / "task.toml").write_text(toml)
    if how == "tests/Dockerfile":
        (folder / "tests/Dockerfile").write_text("FROM judge:1\nCOPY . /tests\n")
    elif how == "tests in the image":
        shutil.rmtree(folder / "tests")
    prepared = prepare_images(folder, images)
    assert [Path(found.image).name for found in prepared] == ["judge_1.tar", "small_1.tar"]
    task = load_task(folder, images=images)
    assert (task.separate, task.agent_user, task.grader.verifier_user) == (True, "0", "judge")
    status, output, snapshot = await lab.run("cat /etc/which-system; echo hello > out.txt; touch extra", task=task)
    assert (status.code, output) == (0, "small\n")
    found = await grade(task, lab.sandbox, lab.root, snapshot, lab.folder / "grading", lab.limits)
    assert (found.reward, found.detail) == (1.0, "")


async def checked(lab: Any, system: Path, verifiers: str) -> tuple[str, Path, Images]:
    """The one problem of a task whose verifier has the image `verifiers` of its own; its folder, and the images."""
    images = verifiers_image(lab, system)
    folder = lab.task(toml="", name="graded", dockerfile=BASE, test_sh=JUDGE).folder
    (folder / "task.toml").write_text(OWN.format(f'docker_image = "{verifiers}"'))
    checks = await check_tasks(folder, lab.sandbox, lab.root, lab.limits, images=images)
    assert len(checks[0].problems) == 1
    return checks[0].problems[0], folder, images


async def test_a_verifiers_image_that_is_not_there_is_named(lab: Any, system: Path, cache: Path) -> None:
    problem, folder, images = await checked(lab, system, "gone:1")
    assert "verifier.environment.docker_image 'gone:1' is not in sandbox.images" in problem
    assert "'gone:1'" in prepare_images(folder, images)[0].problem


async def test_an_unknown_verifier_is_named_by_the_check(lab: Any, system: Path, cache: Path) -> None:
    problem, _, _ = await checked(lab, system, "small:1")
    assert "user 'judge' is not in the image's /etc/passwd" in problem


# ---- of a step ----

SEEN = """#!/bin/bash
[[ -e /app/out.txt ]] && out=out || out=nothing
echo "$(cat /etc/which-system) $(id -u) ${LEVEL-} ${OWN-} $PWD $out $1" > /logs/verifier/seen
echo %s > /logs/verifier/reward.txt
"""
STEPS = {
    "shared": 'artifacts = ["out.txt"]\n[steps.verifier]\nenvironment_mode = "shared"\n',
    "fresh": 'artifacts = ["out.txt"]\n[steps.verifier]\nenvironment_mode = "separate"\n',
    "own": 'artifacts = ["out.txt"]\n[steps.verifier]\nuser = "judge"\n[steps.verifier.environment]\n'
    'docker_image = "judge:1"\nworkdir = "/tmp"\nenv = { OWN = "${X:-own}" }\n',
    "built": '[steps.verifier.environment]\nenv = { OWN = "x" }\n',
    "settings": 'artifacts = ["out.txt"]\n[steps.verifier.environment]\nworkdir = "/tmp"\n',
}


async def test_each_step_is_graded_in_the_environment_that_it_names(
    lab: Any, scripted: Any, system: Path, cache: Path
) -> None:
    verifiers_image(lab, system, ("tests/test.sh", SEEN % 0.25))
    files = {f"steps/{name}/tests/test.sh": SEEN % 0.5 for name in ("shared", "fresh", "settings")}
    files["environment/Dockerfile"] = BASE + "ENV LEVEL=1\n"
    files["steps/built/tests/Dockerfile"] = "FROM judge:1\nWORKDIR /app\nCOPY check.sh /tests/test.sh\n"
    files["steps/built/tests/check.sh"] = SEEN % 0.75
    folder = written(lab, STEPS, **files)
    for name in ("own", "built"):
        (folder / f"steps/{name}/tests/test.sh").unlink()
    images = Images(lab.folder / "images")
    assert [Path(found.image).name for found in prepare_images(folder, images)] == ["judge_1.tar", "small_1.tar"]
    task = load_task(folder, {}, images)
    harness = ByStep(dict.fromkeys(STEPS, "touch out.txt"))
    result = await played(lab, scripted([]), task, harness, CallReport(1), keep="all")
    assert [(step.name, step.reward) for step in result.steps] == [
        ("shared", 0.5),
        ("fresh", 0.5),
        ("own", 0.25),
        ("built", 0.75),
        ("settings", 0.5),
    ], result
    assert result.workspace is not None
    seen = {
        name: (result.workspace / folder / "1/verifier/seen").read_text().split()
        for name, folder in zip(STEPS, ("grading", "grading-2", "grading-3", "grading-4", "grading-5"))
    }
    assert seen == {
        "shared": ["small", "0", "1", "/app", "out"],
        "fresh": ["small", "0", "1", "/app", "out"],
        "own": ["verifier", "77", "own", "/tmp", "out"],
        "built": ["verifier", "0", "x", "/app", "nothing"],
        "settings": ["small", "0", "1", "/tmp", "out"],
    }


async def test_a_steps_image_that_is_not_there_is_named(lab: Any, system: Path, cache: Path) -> None:
    images = verifiers_image(lab, system)
    keys = '[steps.verifier.environment]\ndocker_image = "gone:1"\n'
    folder = written(lab, {"one": "", "two": keys}, **{"environment/Dockerfile": BASE})
    (check,) = await check_tasks(folder, lab.sandbox, lab.root, lab.limits, images=images)
    (problem,) = check.problems
    assert "step 'two': verifier.environment.docker_image 'gone:1' is not in sandbox.images; put it there" in problem
    assert "steps/two/tests/Dockerfile" in problem


async def test_the_tasks_verifier_is_that_of_its_steps(lab: Any, system: Path, cache: Path) -> None:
    """Its image holds its tests, so no step's tests are shown, as in Harbor."""
    images = verifiers_image(lab, system)
    files = {"environment/Dockerfile": BASE, "tests/Dockerfile": "FROM judge:1\n", "tests/test.sh": "exit"}
    more = '[verifier]\nuser = "judge"\nenvironment_mode = "separate"\n'
    steps = {"one": "", "two": '[steps.verifier]\nuser = "0"\nenvironment_mode = "shared"\n'}
    one, two = load_task(written(lab, steps, more, **files), images=images).steps
    assert one.own_verifier is not None and one.own_verifier.image is not None
    assert (one.own_verifier.image.path.name, one.own_verifier.verifier_user) == ("judge_1.tar", "judge")
    assert (one.test_folders, one.test_file) == (("tests",), "tests/test.sh")
    assert (two.own_verifier, two.verifier_user) == (None, "0")
    assert (two.test_folders, two.test_file) == (("tests", "steps/two/tests"), "steps/two/tests/test.sh")


LARGE = "#!/bin/bash\nx=$(head -c 100000000 /dev/zero | tr '\\0' x)\n{}echo 1 > /logs/verifier/reward.txt\n"


@pytest.mark.parametrize(("environment", "verifier", "reason"), [(32, 400, GRADED), (400, 32, FAILED)])
async def test_a_graders_limits_are_those_of_its_environment(
    lab: Any, environment: int, verifier: int, reason: str
) -> None:
    toml = f"[environment]\nmemory_mb = {environment}\n[verifier.environment]\nmemory_mb = {verifier}\n"
    task = lab.task(toml=toml, test_sh=LARGE.format("" if reason == GRADED else "sleep 60\n"))
    assert (task.memory, task.grader.memory) == (environment * MIB, verifier * MIB)
    _, _, snapshot = await lab.run("true", task=task)
    found = await grade(task, lab.sandbox, lab.root, snapshot, lab.folder / "grading", lab.limits)
    assert (found.reason, found.detail) == (reason, "" if reason == GRADED else "over its limit of memory")


def test_a_graders_limits_are_not_its_tasks_where_its_environment_sets_none(lab: Any) -> None:
    """In Harbor a verifier's table is whole: what it leaves out is not taken from the task's."""
    own = lab.task(toml="[environment]\nmemory_mb = 8\nstorage_mb = 9\n[verifier.environment]\nstorage_mb = 7\n").grader
    assert (own.memory, own.storage) == (0, 7 * MIB)
    same = lab.task(toml="[environment]\nmemory_mb = 8\n[verifier]\nenvironment_mode = 'separate'\n").grader
    assert same.memory == 8 * MIB
