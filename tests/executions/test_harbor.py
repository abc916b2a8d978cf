"""What Harbor's task.toml asks of an execution beyond files, and that Harbor reads it alike."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from gyre.executions.check import check_task
from gyre.executions.execution import CallReport
from gyre.executions.grading import GRADED, Grade, grade
from gyre.executions.limits import MIB
from gyre.executions.steps import Part, Step, parts
from gyre.executions.tasks import load_task

ROOT = Path(__file__).resolve().parents[2]
HARBOR = ROOT / ".venv" / "harbor"
TRIES = "echo x >> /tmp/tried; (( $(wc -l < /tmp/tried) > 2 ))"
FLAKY = f'schema_version = "1.2"\n[environment.healthcheck]\ncommand = "{TRIES}"\n'


async def test_a_harness_starts_once_its_environment_is_healthy(lab: Any) -> None:
    """Two failures are within the retries; the key is the harness's alone to use, so both share one sandbox."""
    task = lab.task(toml=FLAKY + "retries = 3\ninterval_sec = 0.01\n")
    check = await check_task(task, lab.sandbox, lab.root, lab.limits)
    assert (check.solution, check.untouched, check.problems) == (1.0, 0.0, ())


@pytest.mark.parametrize(
    ("settings", "healthy"),
    [
        ("retries = 2\ninterval_sec = 0.01\n", False),
        ("retries = 1\nstart_period_sec = 60\nstart_interval_sec = 0.01\n", True),
    ],
)
async def test_failures_count_after_the_start_period(lab: Any, scripted: Any, settings: str, healthy: bool) -> None:
    from tests.executions.test_execution import Command, execute

    task = lab.task(toml=FLAKY + settings)
    calls = CallReport(1 if healthy else 0)
    result = await execute(lab, scripted([]), Command("echo hello > out.txt"), calls, task=task)
    expected = ("graded", "finished", 1.0) if healthy else ("excluded", "environment_unhealthy", None)
    assert (result.outcome, result.reason, result.reward) == expected
    if not healthy:
        check = await check_task(task, lab.sandbox, lab.root, lab.limits)
        assert "untouched: the environment's healthcheck failed" in check.problems


async def test_a_harness_that_ends_like_a_healthcheck_is_graded(lab: Any, scripted: Any) -> None:
    from tests.executions.test_execution import Command, execute

    task = lab.task(toml='schema_version = "1.2"\n[environment.healthcheck]\ncommand = "true"\n')
    result = await execute(lab, scripted([]), Command("exit 86"), CallReport(2), task=task)
    assert (result.outcome, result.reason) == ("graded", "harness_failed")


SEPARATE = 'artifacts = ["out.txt", { source = "/data/table" }]\n[verifier]\nenvironment_mode = "separate"\n'
TEST_SH = """#!/bin/bash
ls /app /data /logs/artifacts /home 2>/dev/null >/logs/verifier/seen
[[ $(cat /app/out.txt) == hello && ! -e /usr/local/bin/made && $(type -P helper) == "" ]] && r=1 || r=0
echo $r >/logs/verifier/reward.txt
"""


async def separate(lab: Any, command: str) -> tuple[Grade, list[str]]:
    task = lab.task(toml=SEPARATE, test_sh=TEST_SH, dockerfile="FROM x\nWORKDIR /app\nCOPY Dockerfile seed\n")
    _, _, snapshot = await lab.run(command, task=task)
    place = lab.folder / f"grading-{lab.count}"
    found = await grade(task, lab.sandbox, lab.root, snapshot, place, lab.limits)
    seen = place / "verifier/seen"
    return found, seen.read_text().split() if seen.exists() else []


async def test_a_separate_verifier_sees_the_artifacts_and_nothing_else(lab: Any) -> None:
    work = "mkdir -p /data/table /logs/artifacts; touch /data/table/a /logs/artifacts/b /home/c extra; rm seed"
    found, seen = await separate(lab, f"{work}; echo hello > out.txt")
    assert (found.reward, found.reason) == (1.0, GRADED), found.detail
    assert seen == ["/app:", "out.txt", "seed", "/data:", "table", "/home:", "/logs/artifacts:", "b"]


@pytest.mark.parametrize(
    "cheat",
    [
        "ln -s /etc/passwd out.txt",
        "ln -s /logs/verifier/reward.txt out.txt",
        "mkdir -p /logs/verifier; echo 1 >/logs/verifier/reward.txt; echo bye >out.txt",
        "rm -rf /logs; ln -s / /logs; mkdir /artifacts; touch /artifacts/x; echo bye >out.txt",
        "mkdir -p /data; ln -s / /data/table; echo bye > out.txt",
    ],
)
async def test_a_separate_verifier_is_not_led_astray(lab: Any, cheat: str) -> None:
    found, _ = await separate(lab, cheat)
    assert found.reward in (0.0, None), found


def ours_and_theirs(path: Path, config: Any) -> list[tuple[str, Any, Any]]:
    """(key, what gyre reads, what Harbor reads) of one task."""
    task = load_task(path, {"SET": "-"})
    environment, verifier = config.environment, config.verifier
    return [
        ("agent.timeout_sec", task.agent_timeout, config.agent.timeout_sec or 0.0),
        ("verifier.timeout_sec", task.verifier_timeout, verifier.timeout_sec),
        ("environment.memory_mb", task.memory, (environment.memory_mb or 0) * MIB),
        ("environment.storage_mb", task.storage, (environment.storage_mb or 0) * MIB),
        ("environment.env", sorted(task.env), sorted(environment.env)),
        ("verifier.env", sorted(task.verifier_env), sorted(verifier.env)),
        ("solution.env", sorted(task.solution_env), sorted(config.solution.env)),
        ("workdir", environment.workdir in (None, task.workdir), True),
        ("docker_image", environment.docker_image in (None, task.docker_image), True),
        ("artifacts", task.artifacts, tuple(a if isinstance(a, str) else a.source for a in config.artifacts)),
        ("healthcheck", _fields(task.healthcheck), _fields(environment.healthcheck)),
        ("strategy", task.step_reward, getattr(config.multi_step_reward_strategy, "value", "mean")),
        ("steps", [step.name for step in task.steps], [step.name for step in config.steps or []]),
        *(row for step, theirs in zip(task.steps, config.steps or []) for row in _step_rows(step, theirs, config)),
        *(
            row
            for part, theirs in zip(parts(task), config.steps or [None])
            for row in _grader_rows(part, theirs, config)
        ),
    ]


def _grader_rows(part: Part, theirs: Any, config: Any) -> list[tuple[str, Any, Any]]:
    """Where a task, or a step of one, is graded, by Harbor's own resolution."""
    from harbor.models.task.paths import TaskPaths
    from harbor.models.task.verifier_mode import resolve_verifier_environment_definition

    task, paths = part.task, TaskPaths(part.task.folder)
    found = resolve_verifier_environment_definition(config, paths, theirs)
    if found is None:
        return [(f"{part.name}: verifier.environment", (task.separate, task.own_verifier), (False, None))]
    own, grader = found.config, task.grader
    bundled = (str(found.directory.relative_to(task.folder)),) if found.bundled_tests else None
    return [
        (f"{part.name}: separate", task.separate, True),
        (f"{part.name}: verifier.environment.memory_mb", grader.memory, (own.memory_mb or 0) * MIB),
        (f"{part.name}: verifier.environment.storage_mb", grader.storage, (own.storage_mb or 0) * MIB),
        (f"{part.name}: verifier.environment.env", sorted(grader.env), sorted(own.env)),
        (f"{part.name}: verifier.environment.workdir", own.workdir in (None, grader.workdir), True),
        (f"{part.name}: verifier.environment.docker_image", own.docker_image in (None, grader.docker_image), True),
        (f"{part.name}: tests in the image", task.test_folders if bundled else None, bundled),
    ]


def _step_rows(step: Step, theirs: Any, config: Any) -> list[tuple[str, Any, Any]]:
    """What a step takes from its task is Harbor's to merge at run time: here by its documented rules."""
    least = theirs.min_reward
    artifacts = tuple(a if isinstance(a, str) else a.source for a in [*config.artifacts, *theirs.artifacts])
    timeout = config.agent.timeout_sec if theirs.agent.timeout_sec is None else theirs.agent.timeout_sec
    users = [
        config_user if own is None else own
        for own, config_user in (
            (theirs.agent.user, config.agent.user),
            (theirs.verifier.user, config.verifier.user),
        )
    ]
    return [
        (
            f"{step.name}: users",
            [step.agent_user, step.verifier_user],
            ["" if user is None else str(user) for user in users],
        ),
        (f"{step.name}: agent.timeout_sec", step.agent_timeout, timeout or 0.0),
        (f"{step.name}: verifier.timeout_sec", step.verifier_timeout, theirs.verifier.timeout_sec),
        (f"{step.name}: verifier.env", step.verifier_env.keys(), {**config.verifier.env, **theirs.verifier.env}.keys()),
        (f"{step.name}: artifacts", step.artifacts, artifacts),
        (f"{step.name}: min_reward", step.min_reward, least if isinstance(least, dict) else _of_one(least)),
        (f"{step.name}: healthcheck", _fields(step.healthcheck), _fields(theirs.healthcheck)),
    ]


def _of_one(least: float | None) -> dict[str, float]:
    return {} if least is None else {"reward": least}


def _fields(check: Any) -> tuple[Any, ...] | None:
    names = ("command", "interval_sec", "timeout_sec", "start_period_sec", "start_interval_sec", "retries")
    return tuple(getattr(check, name) for name in names) if check is not None else None


RESOURCES = "memory_mb = 64\nstorage_mb = 128\nworkdir = '/w'\nenv = { B = '1' }\n"
VERIFIERS = {
    "table": f"[environment]\nmemory_mb = 32\nworkdir = '/e'\n[verifier.environment]\ncpus = 2\n{RESOURCES}",
    "older": "[verifier.environment]\nmemory = '1.5G'\nstorage = '512M'\nhealthcheck = {command = 'x'}\n",
    "image": "[environment]\ndocker_image = 'x'\n[verifier]\nenvironment_mode = 'separate'\n",
    "fresh": f"[environment]\n{RESOURCES}[verifier]\nenvironment_mode = 'separate'\n",
}
"""task.toml by what its verifier's environment comes from; "image" has a tests/Dockerfile."""
STEP_VERIFIERS = (
    {
        "taken": "[steps.agent]\nuser = 1234\n[steps.verifier]\nuser = 'root'\n",
        "shared": "[steps.verifier]\nenvironment_mode = 'shared'\n",
        "table": "[steps.verifier.environment]\nmemory = '64M'\n",
        "built": f"[steps.verifier.environment]\n{RESOURCES}",
        "fresh": "[steps.verifier]\nenvironment_mode = 'separate'\n",
    },
    f"[agent]\nuser = 'me'\n[verifier]\nuser = 7\n[environment]\nstorage_mb = 9\n[verifier.environment]\n{RESOURCES}",
    {"steps/built/tests/Dockerfile": "FROM x\n"},
)
OLDER = 'version = "1.0"\n[environment]\nmemory = "2G"\nstorage = "512M"\nallow_internet = false\n'


@pytest.mark.slow
def test_harbor_reads_the_same(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Harbor's own model of task.toml (which needs no Python 3.12; the writer it imports is not used)."""
    if not HARBOR.is_dir():
        pytest.skip(f"Harbor is not in {HARBOR}: make test-slow installs it")
    from tests.executions.test_steps import FULL_STEPS, written
    from tests.executions.test_tasks import FULL

    monkeypatch.setattr(sys, "path", [*sys.path, str(HARBOR)])
    monkeypatch.setitem(sys.modules, "toml", types.ModuleType("toml"))
    from harbor.models.task.config import TaskConfig

    folders = [lab.task(name=f"made-{number}").folder for number in range(4)]
    for folder, toml in zip(folders, (FULL, OLDER, SEPARATE, FLAKY + "retries = 7\ntimeout_sec = 1.5\n")):
        (folder / "task.toml").write_text(toml)
    for name, toml in VERIFIERS.items():
        folders.append(lab.task(name=f"verifier-{name}").folder)
        (folders[-1] / "task.toml").write_text(toml)
    (lab.folder / "tasks/verifier-image/tests/Dockerfile").write_text("FROM x\n")
    folders.append(written(lab, *FULL_STEPS).rename(lab.folder / "tasks/full-steps"))
    steps, more, files = STEP_VERIFIERS
    folders.append(written(lab, steps, more, **files).rename(lab.folder / "tasks/step-verifiers"))
    folders.append(written(lab, steps, more, **files, **{"tests/Dockerfile": "FROM x\n"}))
    folders += sorted(path.parent for path in (ROOT / "recipes/tasks").glob("*/*/task.toml"))
    assert len(folders) > 90
    for folder in folders:
        config = TaskConfig.model_validate_toml((folder / "task.toml").read_text())
        differing = [row for row in ours_and_theirs(folder, config) if row[1] != row[2]]
        assert differing == [], folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "toml",
    [
        "[agent]\ntimeout_sec = 'soon'",
        "[environment]\nmemory = 'lots'",
        "[environment]\nmemory = '1G'\nmemory_mb = 512",
        "[verifier.environment]\nstorage = 'lots'",
        "[verifier]\nenvironment_mode = 'both'",
        "[verifier]\nenvironment_mode = 'shared'\nenvironment = {}",
        "[[steps]]\nname = 'a'\nverifier = { environment_mode = 'shared', environment = {} }",
        "[[steps]]\nname = 'a'\nverifier = { environment = { memory_mb = 'lots' } }",
        "multi_step_reward_strategy = 'best'",
        "[[steps]]\nmin_reward = 1",
        "[[steps]]\nname = 'a'\nmin_reward = 'much'",
        *(f"[[steps]]\nname = '{name}'" for name in ("", "..", "a/b", "a.", "con", "a:b", "x" * 256)),
    ],
)
def test_what_harbor_refuses_gyre_refuses(lab: Any, toml: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not HARBOR.is_dir():
        pytest.skip(f"Harbor is not in {HARBOR}: make test-slow installs it")
    from gyre.errors import UserError

    monkeypatch.setattr(sys, "path", [*sys.path, str(HARBOR)])
    monkeypatch.setitem(sys.modules, "toml", types.ModuleType("toml"))
    from harbor.models.task.config import TaskConfig

    with pytest.raises(ValueError):
        TaskConfig.model_validate_toml(toml)
    with pytest.raises(UserError):
        lab.task(toml=toml)
