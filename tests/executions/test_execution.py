"""Whole executions: the shell agent in the sandbox, a scripted model on the handed-out socket, and the grade."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gyre.executions.execution import CallReport, ExecutionRequest, ExecutionResult, Timeouts, run_execution
from gyre.executions.harnesses import Launch, LaunchRequest, find_harness

TIMES = Timeouts(harness=30, grader=30, execution=60)
SECRET = "key-of-this-execution"


class Command:
    """A harness that is one shell command."""

    name, dialect = "command", "openai-chat"

    def __init__(self, command: str) -> None:
        self.command = command

    def check(self, version: str) -> str:
        return version

    def prepare(self, request: LaunchRequest) -> Launch:
        return Launch(argv=("bash", "-c", self.command), env={"KEY": request.key})


async def execute(
    lab: Any,
    model: Any,
    harness: Any = None,
    report: CallReport | None = None,
    task: Any = None,
    cut: asyncio.Event | None = None,
    **more: Any,
) -> ExecutionResult:
    fields = {"name": "e-1.1", "key": SECRET, "model": "tiny", "timeouts": TIMES, "limits": lab.limits, **more}
    request = ExecutionRequest(task=task or lab.task(), **fields)
    calls = (lambda: report) if report else (lambda: CallReport(model_calls=len(model.requests)))
    try:
        chosen = harness or find_harness("shell")
        return await run_execution(request, chosen, lab.sandbox, lab.root, model.serve, calls, cut)
    finally:
        model.close()


def leftovers(lab: Any) -> list[Path]:
    return list((lab.root / "executions").iterdir())


@pytest.mark.every_kind
async def test_solved(lab: Any, scripted: Any) -> None:
    model = scripted(["echo hello > out.txt", None])
    result = await execute(lab, model)
    assert (result.outcome, result.reason, result.reward) == ("graded", "finished", 1.0)
    assert (result.model_calls, result.exit.code) == (2, 0)
    assert min(result.seconds.prepare, result.seconds.run, result.seconds.grade) > 0
    assert model.keys == {SECRET}
    assert leftovers(lab) == []
    assert result.workspace is result.log is None


async def test_not_solved(lab: Any, scripted: Any) -> None:
    result = await execute(lab, scripted(["echo bye > out.txt", None]))
    assert (result.outcome, result.reward) == ("graded", 0.0)


@pytest.mark.every_kind
async def test_neither_tests_nor_rewards_are_within_the_agents_reach(lab: Any, scripted: Any) -> None:
    look = "ls -d /tests /solution /logs/verifier 2>&1; grep -rl GRADER'-'MARK / --exclude-dir={proc,usr,dev}"
    forge = "d=/logs/verifier; mkdir -p $d; echo 1 > $d/reward.txt; echo '{\"reward\": 1}' > $d/reward.json"
    model = scripted([look, forge, None])
    task = lab.task(test_sh="#!/bin/bash\n# GRADER-MARK\nls /logs/verifier; echo 0.5 > /logs/verifier/reward.txt\n")
    result = await execute(lab, model, task=task)
    assert (result.outcome, result.reward) == ("graded", 0.5)
    answers = [message["content"] for message in model.requests[-1]["messages"] if message["role"] == "tool"]
    missing = [f"ls: cannot access '{path}': No such file or directory" for path in look.split()[2:5]]
    assert answers[0].splitlines() == [*missing, "[exit code 1]"]


@pytest.mark.every_kind
async def test_the_key_is_in_no_file_and_on_no_command_line(lab: Any, scripted: Any, live: Any) -> None:
    seen: list[list[str]] = []
    model = scripted(["echo hello > out.txt", None])
    serve = model.serve

    async def looking(listener: socket.socket) -> None:
        seen.append(live(SECRET))
        await serve(listener)

    model.serve = looking
    result = await execute(lab, model, keep="all")
    assert (result.reward, seen) == (1.0, [[]])
    assert result.workspace is not None
    assert result.log is not None
    assert "$ echo hello" in result.log.read_text()
    files = [path for path in result.workspace.rglob("*") if path.is_file() and not path.is_symlink()]
    assert files
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
    assert result.workspace.stat().st_mode & 0o077 == 0


@pytest.mark.every_kind
async def test_harness_timeout_is_graded_as_it_stands(lab: Any, scripted: Any, live: Any) -> None:
    harness = Command("echo hello > out.txt; trap '' TERM; (setsid sleep 1234 &); sleep 1234; true")
    times = msgspec.structs.replace(TIMES, harness=0.5)
    result = await execute(lab, scripted([]), harness, CallReport(1), timeouts=times)
    assert (result.outcome, result.reason, result.reward) == ("graded", "harness_timeout", 1.0)
    assert live("sleep 1234") == []
    task = lab.task(toml="[agent]\ntimeout_sec = 0.5\n")
    result = await execute(lab, scripted([]), harness, CallReport(1), task=task)
    assert (result.reason, result.reward) == ("harness_timeout", 1.0)


async def test_what_is_cut_is_graded_as_it_stands(lab: Any, scripted: Any, live: Any) -> None:
    cut = asyncio.Event()
    model = scripted(["echo hello > out.txt", "sleep 1234"])
    work = asyncio.ensure_future(execute(lab, model, cut=cut))
    while len(model.requests) < 2:  # the second one says that the first command was run
        await asyncio.sleep(0.01)
    cut.set()
    result = await work
    assert (result.outcome, result.reason, result.reward) == ("graded", "interrupted", 1.0)
    assert result.interrupted
    assert live("sleep 1234") == []


async def test_what_is_cut_before_its_first_call_is_tried_again(lab: Any, scripted: Any) -> None:
    cut = asyncio.Event()
    cut.set()
    result = await execute(lab, scripted([]), Command("sleep 1234"), CallReport(0), cut=cut)
    assert (result.outcome, result.reason, result.interrupted) == ("retry", "interrupted", True)


async def test_overall_timeout_is_excluded(lab: Any, scripted: Any) -> None:
    times = Timeouts(harness=30, grader=30, execution=0.5)
    result = await execute(lab, scripted([]), Command("sleep 60"), CallReport(1), timeouts=times)
    assert (result.outcome, result.reason, result.reward) == ("excluded", "overall_timeout", None)
    slow = lab.task(test_sh="#!/bin/bash\nsleep 60\n")
    times = Timeouts(harness=30, grader=30, execution=1)
    result = await execute(lab, scripted([]), Command("true"), CallReport(1), task=slow, timeouts=times)
    assert (result.outcome, result.reason, result.reward) == ("excluded", "overall_timeout", None)
    assert leftovers(lab) == []


@pytest.mark.parametrize(
    ("command", "report", "outcome", "reason"),
    [
        ("true", CallReport(0), "excluded", "no_model_call"),
        ("exit 3", CallReport(2, server_error=True), "retry", "server_error"),
        ("exit 3", CallReport(2), "graded", "harness_failed"),
        ("kill -SEGV $$", CallReport(2), "graded", "harness_failed"),
    ],
)
async def test_ends(lab: Any, scripted: Any, command: str, report: CallReport, outcome: str, reason: str) -> None:
    result = await execute(lab, scripted([]), Command(command), report)
    assert (result.outcome, result.reason) == (outcome, reason)
    assert (result.reward is None) == (outcome != "graded")


async def test_grader_failures_are_excluded_after_their_attempts(lab: Any, scripted: Any) -> None:
    task = lab.task(test_sh="#!/bin/bash\nexit 1\n")
    result = await execute(lab, scripted([]), Command("true"), CallReport(1), task=task, keep="failed")
    assert (result.outcome, result.reason, result.reward) == ("excluded", "grader_failed", None)
    assert result.workspace is not None
    assert sorted(path.name for path in (result.workspace / "grading").iterdir()) == ["1", "2"]
    times = msgspec.structs.replace(TIMES, grader=0.3)
    task = lab.task(test_sh="#!/bin/bash\nsleep 60\n")
    result = await execute(lab, scripted([]), Command("true"), CallReport(1), task=task, timeouts=times)
    assert (result.outcome, result.reason) == ("excluded", "grader_timeout")
    assert leftovers(lab) == []


async def test_a_sandbox_that_does_not_start_is_tried_again(lab: Any, scripted: Any) -> None:
    class Unbindable(Command):
        def prepare(self, request: LaunchRequest) -> Launch:
            return Launch(argv=("true",), files={"/proc/nowhere/file": "x"})

    result = await execute(lab, scripted([]), Unbindable(""))
    assert (result.outcome, result.reason) == ("retry", "sandbox_failed")
    assert "bwrap" in result.detail


async def test_an_environment_that_cannot_be_built_is_excluded(lab: Any, scripted: Any) -> None:
    task = lab.task(name="gone", dockerfile="FROM x\nWORKDIR /app\nCOPY Dockerfile data\n")
    (task.folder / "environment/Dockerfile").unlink()
    result = await execute(lab, scripted([]), Command("true"), CallReport(1), task=task)
    assert (result.outcome, result.reason) == ("excluded", "image_unavailable")


@pytest.mark.parametrize("moment", ["running", "grading"])
@pytest.mark.every_kind
async def test_cancellation_leaves_no_process_and_no_workspace(lab: Any, scripted: Any, live: Any, moment: str) -> None:
    word = f"sleep {4321 if moment == 'running' else 8765}"
    harness = Command(f"(setsid {word} &); {word}; true" if moment == "running" else "true")
    task = lab.task(test_sh=f"#!/bin/bash\n{word}\n")
    execution = asyncio.ensure_future(execute(lab, scripted([]), harness, CallReport(1), task=task))
    while not live(word):
        await asyncio.sleep(0.01)
    execution.cancel()
    with pytest.raises(asyncio.CancelledError):
        await execution
    assert live(word) == []
    assert leftovers(lab) == []


async def test_a_workspace_that_a_predecessor_left_is_replaced(lab: Any, scripted: Any) -> None:
    stale = lab.root / "executions/e-1.1/upper/app"
    stale.mkdir(parents=True)
    (stale / "out.txt").write_text("hello\n")
    result = await execute(lab, scripted([]), Command("true"), CallReport(1))
    assert (result.outcome, result.reward) == ("graded", 0.0)


async def test_names_that_are_paths_are_refused(lab: Any, scripted: Any) -> None:
    with pytest.raises(ValueError, match="plain word"):
        await execute(lab, scripted([]), name="../x")


async def test_neither_locked_nor_deep_folders_are_kept(lab: Any, scripted: Any) -> None:
    deep = 'python3 -c \'import os; [(os.mkdir("d"), os.chdir("d")) for _ in range(1200)]\''
    command = f"mkdir -p a/b; touch a/b/c; chmod 000 a/b a; {deep}; echo hello > out.txt"
    result = await execute(lab, scripted([]), Command(command), CallReport(1))
    assert (result.reward, leftovers(lab)) == (1.0, [])
