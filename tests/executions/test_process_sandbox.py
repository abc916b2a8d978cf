"""The `process` kind: the same interface, without isolation."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from gyre.errors import UserError
from gyre.executions.execution import CallReport, ExecutionRequest, Timeouts, run_execution
from gyre.executions.harnesses import find_harness
from gyre.executions.layers import private_folder
from gyre.executions.process_sandbox import ProcessSandbox
from gyre.executions.sandbox import ExitStatus, SandboxFailure, SandboxSpec, make_sandbox
from gyre.executions.tasks import load_task

TASK = Path(__file__).parents[2] / "recipes/tasks/quickstart/create-01"


@pytest.mark.parametrize("solved", [True, False])
async def test_an_execution(lab: Any, scripted: Any, solved: bool) -> None:
    task = load_task(TASK)
    command = (TASK / "solution/solve.sh").read_text().splitlines()[-1] if solved else "true"
    model = scripted([command, None])
    request = ExecutionRequest(
        name="e-1", task=task, key="k", model="m", timeouts=Timeouts(harness=30, grader=30, execution=60)
    )
    result = await run_execution(
        request,
        find_harness("shell"),
        ProcessSandbox(),
        lab.folder,
        model.serve,
        lambda: CallReport(len(model.requests)),
    )
    model.close()
    assert (result.outcome, result.reward, result.model_calls) == ("graded", float(solved), 2)
    assert list((lab.folder / "executions").iterdir()) == []


def spec(lab: Any, *argv: str) -> SandboxSpec:
    upper, scratch = (private_folder(lab.folder / name) for name in ("upper", "scratch"))
    return SandboxSpec(
        lowers=(), upper=upper, scratch=scratch, workdir="/app", argv=argv, log=lab.folder / "log", limits=lab.limits
    )


async def test_kill_finds_what_left_its_session(lab: Any, live: Any) -> None:
    word = f"sleep 77{os.getpid()}"
    running = await ProcessSandbox().start(spec(lab, "bash", "-c", f"(setsid setsid {word} &); exit 5"))
    assert await running.wait(20) == ExitStatus(code=5)
    await running.kill()
    assert live(word) == []
    snapshot = running.snapshot(lab.folder / "snapshot")
    assert (snapshot / "app").is_dir()


async def test_timeout_and_signal(lab: Any) -> None:
    running = await ProcessSandbox().start(spec(lab, "sleep", "100"))
    assert await running.wait(0.02) == ExitStatus(timed_out=True)
    await running.kill()
    assert await running.wait(1) == ExitStatus(signal=9)


async def test_a_missing_command(lab: Any) -> None:
    with pytest.raises(SandboxFailure, match="/no/command"):
        await ProcessSandbox().start(spec(lab, "/no/command"))


async def test_choice_of_kind(tmp_path: Path) -> None:
    assert (await make_sandbox("process", tmp_path)).kind == "process"
    with pytest.raises(UserError, match='sandbox.kind = "apptainer" is not available'):
        await make_sandbox("apptainer", tmp_path)
