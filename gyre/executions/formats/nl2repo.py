"""Reads task folders of NL2RepoBench: start.md (the specification), and the hidden tests that the repository must pass.

The benchmark keeps the hidden tests in container images: they are copied out into `tests/` of the task's folder (with
the image's paths, relative to the work directory). Grading lays them over the workspace, without the agent's own
packaging files and tests, runs the commands, and reads pytest's JUnit report: the reward is passed / test_case_count,
at most 1. (The benchmark's own regular expression over printed output can be gamed.) What it cannot see: the package
under test runs in pytest's own process, and one that tampers with pytest when it is imported tampers with the report.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from gyre.errors import UserError
from gyre.executions.dockerfile import Environment
from gyre.executions.tasks import Task, environment_digest

WORKDIR = "/workspace"
PACKAGING = (
    "setup.py",
    "setup.cfg",
    "pyproject.toml",
    "pytest.ini",
    "tox.ini",
    "conftest.py",
    "requirements*.txt",
    "Pipfile",
    "Pipfile.lock",
    "poetry.lock",
)
"""Of the agent, removed before grading: they could change which tests run, and how."""
VERIFIER_TIMEOUT = 1800.0


def recognises(folder: Path) -> bool:
    return (folder / "start.md").is_file() and (folder / "test_commands.json").is_file()


def load(folder: Path, env: Mapping[str, str]) -> Task:
    """Read one task folder. Raises UserError naming the file and what to do."""
    tests = folder / "tests"
    if not tests.is_dir() or not any(tests.iterdir()):
        raise UserError(f"{tests}: missing or empty; copy the hidden tests out of the task's image into it")
    commands = _strings(folder / "test_commands.json")
    if not commands:
        raise UserError(f"{folder / 'test_commands.json'}: no command")
    instruction = _text(folder / "start.md").strip()
    if not instruction:
        raise UserError(f"{folder / 'start.md'}: the specification is empty")
    return Task(
        name=folder.name,
        folder=folder,
        instruction=instruction,
        environment=Environment(workdir=WORKDIR, folders=(WORKDIR,)),
        workdir=WORKDIR,
        verifier_timeout=VERIFIER_TIMEOUT,
        digest=environment_digest(folder.name, WORKDIR, folder / "environment"),
        test_text=grading_script(commands, _test_files(folder / "test_files.json")),
        solve_file="solution.sh",
        reward="junit",
        expected_tests=_count(folder / "test_case_count.txt"),
    )


def grading_script(commands: list[str], test_files: list[str]) -> str:
    """Bash that grades the workspace it starts in; no path in `test_files` may leave it."""
    lines = [f"rm -rf -- {' '.join(PACKAGING)}"]
    if test_files:
        lines.append(f"rm -rf -- {' '.join(map(shlex.quote, test_files))}")
    lines.append('cp -a "${GYRE_ROOT:-}/tests/." .')
    for number, command in enumerate(commands):
        report = f"${{GYRE_ROOT:-}}/logs/verifier/junit-{number}.xml"
        lines += [f'export PYTEST_ADDOPTS="--junitxml={report}"', f"( {command} )"]
    return "\n".join([*lines, "true", ""])


def _test_files(path: Path) -> list[str]:
    names = _strings(path)
    for name in names:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise UserError(f"{path}: {name!r} leaves the workspace")
    return names


def _strings(path: Path) -> list[str]:
    try:
        found: Any = json.loads(_text(path))
    except ValueError as error:
        raise UserError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise UserError(f"{path}: must be a list of texts")
    return found


def _count(path: Path) -> int:
    text = _text(path).strip()
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) < 1:
        raise UserError(f"{path}: {text[:40]!r} is not a number of tests")
    return int(text)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not readable: {error}") from error
