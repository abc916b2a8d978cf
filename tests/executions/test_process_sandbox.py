"""The `process` kind: the same interface, without isolation."""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from gyre.errors import UserError
from gyre.executions.execution import CallReport, ExecutionRequest, Timeouts, run_execution
from gyre.executions.harnesses import find_harness
from gyre.executions.layers import private_folder
from gyre.executions.marks import Look, Looks, look_for
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
    with pytest.raises(UserError, match="docker is no kind of sandbox: bubblewrap, apptainer, enroot or process"):
        await make_sandbox("docker", tmp_path)


async def test_a_wave_of_ends_shares_looks_and_no_answer_is_older_than_its_question() -> None:
    """Sixteen ask at once: one look. Whoever asks during it gets the next: the one under way may have passed by."""
    begun: list[int] = []
    go, started = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def take() -> Look:
        begun.append(len(begun))
        loop.call_soon_threadsafe(started.set)
        go.wait(30)
        return Look({"n": [len(begun)]})

    looks = Looks(take)
    wave = [asyncio.ensure_future(looks.look()) for _ in range(16)]
    await started.wait()
    late = [asyncio.ensure_future(looks.look()) for _ in range(3)]
    go.set()
    assert [look.marked["n"] for look in await asyncio.gather(*wave)] == [[1]] * 16
    assert [look.marked["n"] for look in await asyncio.gather(*late)] == [[2]] * 3
    assert begun == [0, 1]


async def test_one_that_stops_asking_takes_the_look_from_nobody() -> None:
    looks = Looks(lambda: Look({"n": [1]}))
    gone, stays = asyncio.ensure_future(looks.look()), asyncio.ensure_future(looks.look())
    await asyncio.sleep(0)
    gone.cancel()
    assert (await stays).marked == {"n": [1]}


def test_a_look_finds_the_marked_and_doubts_what_shows_nothing() -> None:
    with subprocess.Popen(["sleep", "60"], env={"GYRE_TEST_LOOK": "a=b", "OTHER": "x"}) as child:
        try:
            assert look_for("GYRE_TEST_LOOK").marked == {"a=b": [child.pid]}
            assert look_for("GYRE_TEST").marked == {}
        finally:
            child.kill()
    with subprocess.Popen(["sleep", "60"], env={}) as child:
        try:
            assert look_for("GYRE_TEST_LOOK").doubtful
        finally:
            child.kill()
