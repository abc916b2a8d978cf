"""A thousand executions with faults on purpose: none is graded wrongly, none is lost, no fault becomes a reward.

The real course of an execution (workspace, snapshot, grading with retries, the outcome table), on a sandbox that plays
its part in this process: what a sandbox really does is test_sandbox.py's matter.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

from gyre.executions import grading
from gyre.executions.execution import CallReport, ExecutionRequest, ExecutionResult, Timeouts, run_execution
from gyre.executions.harnesses import Launch, LaunchRequest
from gyre.executions.sandbox import ExitStatus, SandboxFailure, SandboxSpec
from gyre.executions.tasks import Task

EXECUTIONS, ATTEMPTS, GRADINGS = 1000, 3, 2
GRADED, AGAIN, EXCLUDED = "graded", "retry", "excluded"
HARNESS = {
    # fault of one attempt -> how its harness ends, what becomes of the attempt, and why
    "": (ExitStatus(code=0), GRADED, "finished"),
    "exits": (ExitStatus(code=3), GRADED, "harness_failed"),
    "killed": (ExitStatus(signal=9), GRADED, "harness_failed"),
    "timeout": (ExitStatus(timed_out=True), GRADED, "harness_timeout"),
    "disk": (ExitStatus(signal=9, limit="disk"), GRADED, "limit_disk"),
    "processes": (ExitStatus(signal=9, limit="processes"), GRADED, "limit_processes"),
    "memory": (ExitStatus(signal=9, limit="memory"), AGAIN, "out_of_memory"),
    "server": (ExitStatus(code=1), AGAIN, "server_error"),
    "server, got over": (ExitStatus(code=0), GRADED, "finished"),
    "no call": (ExitStatus(code=0), EXCLUDED, "no_model_call"),
    "overall": (ExitStatus(timed_out=True), EXCLUDED, "overall_timeout"),
    "no start": (ExitStatus(), AGAIN, "sandbox_failed"),
    "no image": (ExitStatus(), EXCLUDED, "image_unavailable"),
    "interrupted early": (ExitStatus(), AGAIN, "interrupted"),
}
GRADER = {
    # fault of one grading -> what the grader leaves (None: nothing), how it ends; "": the truth
    "": (None, ExitStatus(code=0)),
    "exits after its reward": (None, ExitStatus(code=7)),
    "crashes": ("", ExitStatus(signal=11)),
    "empty": (b"", ExitStatus(code=0)),
    "nan": (b"nan", ExitStatus(code=0)),
    "infinite": (b"inf", ExitStatus(code=0)),
    "text": (b"passed", ExitStatus(code=0)),
    "binary": (b"\xff\xfe", ExitStatus(code=0)),
    "full disk": ("", ExitStatus(code=1)),
    "timeout after its reward": (None, ExitStatus(timed_out=True)),
    "memory after its reward": (None, ExitStatus(signal=9, limit="memory")),
    "no start": ("", ExitStatus()),
}
FINE = ("", "exits after its reward")
"""Gradings that give the truth."""
FAILED = {"timeout after its reward": "grader_timeout"}


class Plan(Struct, frozen=True):
    """What happens to one attempt: to its harness, and to each of its gradings."""

    harness: str
    gradings: tuple[str, ...]


class Played:
    """One running command of the stage."""

    def __init__(self, spec: SandboxSpec, status: ExitStatus) -> None:
        self.listener: socket.socket | None = None
        self._spec, self._status, self._dead = spec, status, False

    async def wait(self, timeout: float) -> ExitStatus:
        await asyncio.sleep(0)
        return self._status

    async def kill(self) -> None:
        self._dead = True

    def snapshot(self, target: Path) -> Path:
        assert self._dead
        assert self._spec.upper is not None
        return self._spec.upper.rename(target)


class Stage:
    """A sandbox that plays one attempt by its plan."""

    kind = "stage"

    def __init__(self, plan: Plan, truth: float) -> None:
        self.plan, self.truth = plan, truth
        self.gradings = list(plan.gradings)

    def open_listener(self) -> tuple[int, socket.socket | None]:
        return 1, None

    def lowers(
        self, root: Path, task: Task, below: tuple[Path, ...] = (), snapshot: Path | None = None
    ) -> tuple[Path, ...]:
        if self.plan.harness == "no image":
            raise OSError("the image is gone")
        return ()

    def user(self, root: Path, task: Task, name: str) -> None:
        return None

    async def start(self, spec: SandboxSpec) -> Played:
        await asyncio.sleep(0)
        if spec.upper is not None:
            if self.plan.harness == "no start":
                raise SandboxFailure("no start")
            (spec.upper / "reward.txt").write_text("1")  # a cheat that must not count
            return Played(spec, HARNESS[self.plan.harness][0])
        fault = self.gradings.pop(0)
        if fault == "no start":
            raise SandboxFailure("no start")
        left, status = GRADER[fault]
        (verifier,) = [bind.source for bind in spec.binds if bind.target == "/logs/verifier"]
        if left != "":
            (verifier / "reward.txt").write_bytes(str(self.truth).encode() if left is None else left)
        return Played(spec, status)


class Silent:
    name, dialect = "silent", "openai-chat"

    def check(self, version: str) -> str:
        return version

    def prepare(self, request: LaunchRequest) -> Launch:
        return Launch(argv=("true",))


async def attempt(lab: Any, task: Task, name: str, plan: Plan, truth: float) -> ExecutionResult:
    calls = 0 if plan.harness in ("no call", "interrupted early") else 3
    report = CallReport(calls, server_error=plan.harness.startswith("server"))
    cut = asyncio.Event()
    if plan.harness == "interrupted early":
        cut.set()
    stage = Stage(plan, truth)
    if plan.harness == "interrupted early":
        stage.start = _never_ending(stage.start)  # type: ignore[method-assign]
    request = ExecutionRequest(
        name=name,
        task=task,
        key="k",
        model="m",
        timeouts=Timeouts(harness=3600, grader=3600, execution=0 if plan.harness == "overall" else 7200),
        grader_attempts=GRADINGS,
    )

    async def handler(listener: socket.socket) -> None:
        raise AssertionError("no listener was handed out")

    return await run_execution(request, Silent(), stage, lab.root, handler, lambda: report, cut)


def _never_ending(start: Any) -> Any:
    async def started(spec: SandboxSpec) -> Played:
        running: Played = await start(spec)

        async def wait(timeout: float) -> ExitStatus:
            await asyncio.Event().wait()
            raise AssertionError

        running.wait = wait  # type: ignore[method-assign]
        return running

    return started


def expected(plan: Plan, truth: float) -> tuple[str, str, float | None]:
    """(outcome, reason, reward) of one attempt, from what was done to it and nothing else."""
    _, outcome, reason = HARNESS[plan.harness]
    if outcome != GRADED:
        return outcome, reason, None
    if any(fault in FINE for fault in plan.gradings):
        return GRADED, reason, truth
    return EXCLUDED, FAILED.get(plan.gradings[-1], "grader_failed"), None


def plans(rng: random.Random) -> list[Plan]:
    """Of the attempts that an execution may need: half of them have a fault."""

    def one(faults: dict[str, Any]) -> str:
        return rng.choice(list(faults)) if rng.random() < 0.5 else ""

    return [Plan(one(HARNESS), tuple(one(GRADER) for _ in range(GRADINGS))) for _ in range(ATTEMPTS)]


@pytest.mark.slow
async def test_a_thousand_executions_with_faults(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grading, "pause_before", lambda failures: 0.0)
    rng, task = random.Random(20261130), lab.task()
    ends: dict[str, tuple[str, float | None]] = {}
    seen: Counter[str] = Counter()
    free = asyncio.Semaphore(32)

    async def execution(number: int) -> None:
        name, truth, planned = f"e{number:04d}", rng.choice([0.0, 0.25, 1.0]), plans(rng)
        async with free:
            for tried, plan in enumerate(planned, start=1):
                result = await attempt(lab, task, f"{name}.{tried}", plan, truth)
                assert (result.outcome, result.reason, result.reward) == expected(plan, truth), (name, plan)
                seen.update([f"harness {plan.harness}", *(f"grader {fault}" for fault in plan.gradings)])
                if result.outcome != AGAIN:
                    break
        assert name not in ends
        ends[name] = (result.outcome, result.reward)

    await asyncio.gather(*(execution(number) for number in range(EXECUTIONS)))
    assert len(ends) == EXECUTIONS
    assert all((reward is None) == (outcome != GRADED) for outcome, reward in ends.values())
    counted = Counter(outcome for outcome, _ in ends.values())
    assert min(counted[GRADED], counted[EXCLUDED]) > 100, counted
    assert all(seen[f"harness {fault}"] for fault in HARNESS) and all(seen[f"grader {fault}"] for fault in GRADER)
    assert list((lab.root / "executions").iterdir()) == []
