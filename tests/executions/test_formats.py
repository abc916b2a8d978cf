"""Task folders of terminal-bench and NL2RepoBench: what is read and refused, and what cannot be had by cheating."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from gyre.errors import UserError
from gyre.executions.check import check_tasks
from gyre.executions.execution import Timeouts
from gyre.executions.grading import FAILED, GRADED, Grade, grade
from gyre.executions.rewards import NoReward, find_reward, pass_rate
from gyre.executions.tasks import load_task, load_tasks

TASKS = Path(__file__).resolve().parents[2] / "recipes" / "tasks"
TERMINAL_BENCH, NL2REPO = "terminal-bench/sum-lines", "nl2repo/slugs"
CASE = '<testcase classname="t" name="{}">{}</testcase>'


def report(*verdicts: str) -> str:
    """A JUnit report of tests 0, 1, ...: "" passed, else the tag inside."""
    cases = (CASE.format(number, f"<{tag}/>" if tag else "") for number, tag in enumerate(verdicts))
    return f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>"


def copy(tmp_path: Path, name: str) -> Path:
    return Path(shutil.copytree(TASKS / name, tmp_path / Path(name).name))


def test_terminal_bench_is_read() -> None:
    task = load_task(TASKS / "terminal-bench" / "sum-lines")
    assert task.instruction.startswith("numbers.txt holds one number a line.")
    assert (task.agent_timeout, task.verifier_timeout, task.workdir) == (120.0, 60.0, "/app")
    assert (task.reward, task.test_file, task.verifier_env) == ("junit-all", "run-tests.sh", {"TEST_DIR": "/tests"})


def test_nl2repo_is_read() -> None:
    task = load_task(TASKS / "nl2repo" / "slugs")
    assert task.instruction.startswith("# slugs")
    assert (task.reward, task.expected_tests, task.workdir) == ("junit", 6, "/workspace")
    assert "rm -rf -- tests\n" in task.test_text


def test_formats_are_mixed_and_a_recipes_reward_wins(tmp_path: Path) -> None:
    for name in ("terminal-bench/sum-lines", "nl2repo/slugs", "quickstart/count-01"):
        copy(tmp_path, name)
    assert [task.reward for task in load_tasks(tmp_path)] == ["file", "junit", "junit-all"]
    assert {task.reward for task in load_tasks(tmp_path, reward="junit")} == {"junit"}


@pytest.mark.parametrize(
    ("name", "file", "text", "message"),
    [
        (TERMINAL_BENCH, "task.yaml", "a: [", "task.yaml: not readable as YAML"),
        (TERMINAL_BENCH, "task.yaml", "x: 1", "task.yaml: Object missing required field `instruction`"),
        (
            "terminal-bench/sum-lines",
            "task.yaml",
            "instruction: x\nparser_name: swe",
            "parser_name 'swe' is not covered",
        ),
        (TERMINAL_BENCH, "task.yaml", "- x", "task.yaml: Expected `object`, got `array`"),
        (
            TERMINAL_BENCH,
            "task.yaml",
            "instruction: x\nmax_agent_timeout_sec: -1",
            "max_agent_timeout_sec must be a number",
        ),
        (
            TERMINAL_BENCH,
            "task.yaml",
            "instruction: x\nmax_test_timeout_sec: .nan",
            "max_test_timeout_sec must be a num",
        ),
        (TERMINAL_BENCH, "task.yaml", 'instruction: "\\ud800"', "instruction is no Unicode text"),
        (TERMINAL_BENCH, "docker-compose.yaml", "services:", "docker-compose.yaml: no services"),
        (TERMINAL_BENCH, "docker-compose.yaml", "- services", "docker-compose.yaml: no services"),
        (TERMINAL_BENCH, "task.yaml", "instruction: ' '", "the instruction is empty"),
        (
            "terminal-bench/sum-lines",
            "docker-compose.yaml",
            "services: {a: {}, b: {}}",
            "2 services, and one is covered",
        ),
        (NL2REPO, "test_commands.json", "{}", "test_commands.json: must be a list of texts"),
        (NL2REPO, "test_commands.json", "[]", "test_commands.json: no command"),
        (NL2REPO, "test_case_count.txt", "many", "test_case_count.txt: 'many' is not a number of tests"),
        (NL2REPO, "test_case_count.txt", "\u00b2", "test_case_count.txt: '\u00b2' is not a number of tests"),
        (NL2REPO, "test_commands.json", '["\\u0000"]', "test_text has a NUL character"),
        (NL2REPO, "test_files.json", '["../x"]', r"test_files.json: '../x' leaves the workspace"),
        (NL2REPO, "start.md", "\n", "the specification is empty"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, name: str, file: str, text: str, message: str) -> None:
    folder = copy(tmp_path, name)
    (folder / file).write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        load_task(folder)
    assert "\n" not in str(caught.value)


def test_the_hidden_tests_must_be_there(tmp_path: Path) -> None:
    folder = copy(tmp_path, NL2REPO)
    shutil.rmtree(folder / "tests")
    with pytest.raises(UserError, match="copy the hidden tests out of the task's image"):
        load_task(folder)


@pytest.mark.parametrize(
    ("verdicts", "expected", "rate"),
    [
        (("", "failure", "", "skipped"), 0, 0.5),
        (("", "", "error"), 4, 0.5),
        (("", "", ""), 2, 1.0),
        ((), 3, 0.0),
    ],
)
def test_the_pass_rate(tmp_path: Path, verdicts: tuple[str, ...], expected: int, rate: float) -> None:
    (tmp_path / "junit.xml").write_text(report(*verdicts))
    assert pass_rate(tmp_path, expected) == rate


def test_a_test_counts_once_and_fails_if_any_of_it_failed(tmp_path: Path) -> None:
    (tmp_path / "junit-0.xml").write_text(report("", ""))
    (tmp_path / "junit-1.xml").write_text(report("", "failure"))
    assert pass_rate(tmp_path) == 0.5


@pytest.mark.parametrize("text", ["", "no xml", "<a><b></a>", report()])
def test_no_report_is_no_reward(tmp_path: Path, text: str) -> None:
    with pytest.raises(NoReward, match="no JUnit report"):
        pass_rate(tmp_path)
    (tmp_path / "junit.xml").write_text(text)
    with pytest.raises(NoReward):
        pass_rate(tmp_path)


def test_an_unknown_reward_is_refused() -> None:
    with pytest.raises(UserError, match=r"tasks.reward = 'best' is not known; known are file, junit, junit-all"):
        find_reward("best")


RUNNER = """#!/bin/bash
[[ "$(cat out.txt 2>/dev/null)" == hello ]] && inside= || inside='<failure/>'
echo "<testsuite><testcase name='a'/><testcase name='b'>$inside</testcase></testsuite>" >"${PYTEST_ADDOPTS#*=}"
"""
"""In the place of pytest, which this machine's /usr may lack: it writes the report where pytest would."""


async def graded(lab: Any, folder: Path, command: str) -> Grade:
    task = load_task(folder)
    _, _, snapshot = await lab.run(command, task=task)
    return await grade(task, lab.sandbox, lab.root, snapshot, lab.folder / f"grading-{lab.count}", lab.limits)


needs_pytest = pytest.mark.skipif(not Path("/usr/bin/pytest").exists(), reason="apt-get install python3-pytest")
PASSED = "<testsuite><testcase name='x'/></testsuite>"
CHEATS = [
    "echo '999 passed in 0.1s'",
    f'mkdir -p /logs/verifier; for n in "" -0 -9; do echo "{PASSED}" >/logs/verifier/junit$n.xml; done',
    f"mkdir -p tests; printf '#!/bin/bash\necho \"{PASSED}\" >/logs/verifier/junit-0.xml\n' >tests/run.sh",
    "(while [ ! -e /tests ]; do sleep 0.01; done; echo hello >out.txt) >/dev/null 2>&1 & disown",
]
"""Printing, writing the report, editing the tests, leaving a process behind that changes files during grading."""


@pytest.mark.parametrize("cheat", CHEATS)
async def test_nl2repo_cannot_be_cheated_from_the_workspace(lab: Any, tmp_path: Path, cheat: str) -> None:
    folder = copy(tmp_path, NL2REPO)
    shutil.rmtree(folder / "tests")
    (folder / "tests" / "tests").mkdir(parents=True)
    (folder / "tests" / "tests" / "run.sh").write_text(RUNNER)
    (folder / "test_commands.json").write_text('["bash tests/run.sh"]')
    (folder / "test_case_count.txt").write_text("2")
    solved, cheated = await graded(lab, folder, "echo hello > out.txt"), await graded(lab, folder, cheat)
    assert (solved.reward, solved.reason) == (1.0, GRADED), solved.detail
    assert (cheated.reward, cheated.reason) == (0.5, GRADED), cheated.detail


@pytest.mark.parametrize("cheat", CHEATS)
async def test_terminal_bench_is_resolved_or_not(lab: Any, tmp_path: Path, cheat: str) -> None:
    folder = copy(tmp_path, TERMINAL_BENCH)
    (folder / "run-tests.sh").write_text(RUNNER)
    assert (await graded(lab, folder, "echo hello > out.txt")).reward == 1.0
    assert (await graded(lab, folder, cheat)).reward == 0.0
    (folder / "run-tests.sh").write_text("#!/bin/bash\necho 12 passed\n")
    silent = await graded(lab, folder, "true")
    assert (silent.reward, silent.reason) == (None, FAILED)


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/usr/bin/pytest").exists(), reason="pytest is not in /usr: apt-get install python3-pytest"
)
@pytest.mark.parametrize("name", [TERMINAL_BENCH, NL2REPO])
async def test_the_small_tasks_are_good(lab: Any, name: str) -> None:
    (check,) = await check_tasks(TASKS / name, lab.sandbox, lab.root, lab.limits)
    assert (check.solution, check.untouched, check.problems) == (1.0, 0.0, ())


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/usr/bin/pytest").exists(), reason="pytest is not in /usr: apt-get install python3-pytest"
)
async def test_partial_credit_is_the_share_of_passed_tests(lab: Any) -> None:
    half = 'mkdir slugs; echo \'def slugify(text, separator=None): return ""\ndef unique(t, u): return "a-b"\' '
    found = await graded(lab, TASKS / NL2REPO, half + ">slugs/__init__.py")
    assert found.reward == pytest.approx(2 / 6)  # the empty slug, and the free one


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/usr/bin/pytest").exists(), reason="pytest is not in /usr: apt-get install python3-pytest"
)
@pytest.mark.parametrize("name", [TERMINAL_BENCH, NL2REPO])
async def test_the_small_tasks_end_to_end_with_the_shell_harness(lab: Any, scripted: Any, name: str) -> None:
    from tests.executions.test_execution import execute

    task = load_task(TASKS / name)
    model = scripted([task.solution.read_text(), None])
    patient = Timeouts(harness=120, grader=120, execution=400)
    result = await execute(lab, model, task=task, timeouts=patient)
    assert (result.outcome, result.reason, result.reward) == ("graded", "finished", 1.0), result.detail
    assert task.instruction in model.requests[0]["messages"][-1]["content"]
