"""Runs one execution: workspace, sandbox, harness, snapshot, grade, outcome.

Owns the order of these and the workspace folder. Invariants: on every path, cancellation included, no process
of the execution is left when `run_execution` returns; nothing is graded before everything in the sandbox is
dead; the key is written to no file.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Literal

from msgspec import Struct, field, structs

from gyre.executions.ends import finish
from gyre.executions.grading import Grade, grade_with_retries
from gyre.executions.harnesses import Harness, Launch, LaunchRequest
from gyre.executions.healthcheck import UNHEALTHY
from gyre.executions.layers import private_folder, remove_tree
from gyre.executions.limits import Limits
from gyre.executions.outcome import Ending, Outcome, before_grading, judge
from gyre.executions.sandbox import Bind, ExitStatus, RunningSandbox, Sandbox, SandboxFailure, SandboxSpec
from gyre.executions.tasks import NAME, Task
from gyre.executions.transcripts import Told, told_by

Keep = Literal["none", "failed", "all"]
ListenerHandler = Callable[[socket.socket], Awaitable[None]]
"""Serves model calls on the sandbox's listening socket, and owns the socket from then on."""


class Timeouts(Struct, frozen=True, kw_only=True):
    """Seconds.

    The harness's and the grader's are bounded by the task's own; `execution` bounds everything together.
    """

    harness: float
    grader: float
    execution: float


class CallReport(Struct, frozen=True):
    """What the proxy saw of the execution."""

    model_calls: int
    server_error: bool = False
    """The harness got a server error or a broken stream from us and did not get over it."""


class Phases(Struct, frozen=True):
    """Wall seconds."""

    prepare: float = 0.0
    run: float = 0.0
    grade: float = 0.0


class ExecutionRequest(Struct, frozen=True, kw_only=True):
    """One attempt at one task. `name` is unique among live executions of this worker."""

    name: str
    task: Task
    key: str
    model: str
    timeouts: Timeouts
    limits: Limits = Limits()
    max_turns: int = 200
    max_tokens: int = 0
    context: int = 0
    """Longest sequence that the model takes, in tokens; 0: not told to the harness."""
    environment: dict[str, str] = field(default_factory=dict)
    grader_attempts: int = 2
    keep: Keep = "none"
    log: Path | None = None
    """Where the harness's output goes; in the workspace when None."""


class ExecutionResult(Struct, frozen=True, kw_only=True):
    """`reward` is a number exactly when `outcome` is "graded". `workspace` is None once it is removed."""

    outcome: Outcome
    reason: str
    reward: float | None
    seconds: Phases
    exit: ExitStatus
    model_calls: int
    log: Path | None
    workspace: Path | None
    detail: str = ""
    told: Told | None = None
    """What the harness's own transcript counts."""
    interrupted: bool = False
    """It was cut: ended before it had ended by itself."""


class _Run:
    """The mutable course of one execution."""

    def __init__(self, request: ExecutionRequest, sandbox: Sandbox, root: Path, cut: asyncio.Event) -> None:
        self.request = request
        self.cut = cut
        self.sandbox = sandbox
        self.root = root
        self.workspace = root / "executions" / request.name
        self.log = request.log or self.workspace / "harness.log"
        self.limits = request.limits.narrowed(request.task.memory, request.task.storage)
        self.loop = asyncio.get_running_loop()
        self.started = self.loop.time()
        self.marks = [self.started]
        self.detail = ""

    def mark(self) -> None:
        """End of a phase."""
        self.marks.append(self.loop.time())

    def left(self) -> float:
        """Seconds of the execution's overall time."""
        return max(0.0, self.started + self.request.timeouts.execution - self.loop.time())

    def spec(self, launch: Launch, port: int, listener: socket.socket | None) -> SandboxSpec:
        """Make the workspace's folders and write the launch's files. Raises OSError."""
        upper, scratch, files = (private_folder(self.workspace / name) for name in ("upper", "scratch", "files"))
        upper.chmod(0o755)
        binds = list(launch.binds)
        for number, (target, text) in enumerate(launch.files.items()):
            source = files / str(number)
            source.write_text(text, encoding="utf-8")
            binds.append(Bind(source, target))
        task = self.request.task
        self.sandbox.user(self.root, task.grader, task.grader.verifier_user)  # unknown: told before the agent works
        return SandboxSpec(
            lowers=self.sandbox.lowers(self.root, task),
            upper=upper,
            scratch=scratch,
            workdir=task.workdir,
            argv=launch.argv,
            log=self.log,
            binds=tuple(binds),
            env={**task.env, **launch.env},
            listen_port=port,
            listener=listener,
            limits=self.limits,
            before=task.before,
            image=task.on_image,
            user=self.sandbox.user(self.root, task, task.agent_user),
        )

    async def harness(self, harness: Harness, handler: ListenerHandler) -> tuple[Ending, Path | None]:
        """Prepare, start, wait and kill; the ending without the proxy's part, and the snapshot."""
        request = self.request
        port, listener = self.sandbox.open_listener()
        try:
            launch = harness.prepare(
                LaunchRequest(
                    task=request.task,
                    port=port,
                    key=request.key,
                    model=request.model,
                    max_turns=request.max_turns,
                    max_tokens=request.max_tokens,
                    context=request.context,
                    environment=request.environment,
                )
            )
            spec = await asyncio.to_thread(self.spec, launch, port, listener)
        except OSError as error:
            self.detail = str(error)
            _close(listener)
            return Ending(image_error=str(error)), None
        try:
            running = await self.sandbox.start(spec)
        except SandboxFailure as failure:
            self.detail = str(failure)
            _close(listener)
            return Ending(sandbox_error=str(failure)), None
        self.mark()
        ending = await self._wait(running, handler)
        if request.task.healthcheck is not None and ending.exit.code == UNHEALTHY:
            ending = structs.replace(ending, unhealthy=True)
        return ending, running.snapshot(self.workspace / "snapshot")

    async def _wait(self, running: RunningSandbox, handler: ListenerHandler) -> Ending:
        timeouts, own = self.request.timeouts, self.request.task.agent_timeout
        allowed = min(timeouts.harness, own or timeouts.harness)
        try:
            if running.listener is not None:
                await handler(running.listener)
            left = self.left()
            status = await self._status(running, min(allowed, left))
        finally:
            await finish(running.kill())
            self.mark()
        if status is None:
            return Ending(interrupted=True)
        return Ending(exit=status, overall_timeout=status.timed_out and left <= allowed)

    async def _status(self, running: RunningSandbox, seconds: float) -> ExitStatus | None:
        """How the harness ended; None when it was cut before that."""
        ended = asyncio.ensure_future(running.wait(seconds))
        cut = asyncio.ensure_future(self.cut.wait())
        try:
            await asyncio.wait({ended, cut}, return_when=asyncio.FIRST_COMPLETED)
            return ended.result() if ended.done() else None
        finally:
            ended.cancel()
            cut.cancel()

    async def grade(self, snapshot: Path) -> Grade | None:
        """The grade; None when the execution's overall time ran out."""
        request, task = self.request, self.request.task
        grading = grade_with_retries(
            task,
            self.sandbox,
            self.root,
            snapshot,
            self.workspace / "grading",
            self.limits,
            min(request.timeouts.grader, task.verifier_timeout),
            request.grader_attempts,
        )
        try:
            return await asyncio.wait_for(grading, self.left())
        except TimeoutError:
            return None


async def run_execution(
    request: ExecutionRequest,
    harness: Harness,
    sandbox: Sandbox,
    root: Path,
    listener_handler: ListenerHandler,
    call_report: Callable[[], CallReport],
    cut: asyncio.Event | None = None,
) -> ExecutionResult:
    """Run `request` to its outcome. `root` is the worker's workspace folder, on node-local disk.

    `listener_handler` is called once with the sandbox's listening socket; `call_report` once, after
    everything in the sandbox is dead. Once `cut` is set, the harness is ended and its workspace graded as it stands.
    Call from the thread that the event loop lives in: sandboxes die with it. Never raises for what the harness, the
    task or the grader does.
    """
    if not NAME.fullmatch(request.name):
        raise ValueError(f"an execution's name must be a plain word, not {request.name!r}")
    run = _Run(request, sandbox, root, cut or asyncio.Event())
    if run.workspace.exists():
        await asyncio.to_thread(remove_tree, run.workspace)
    private_folder(run.workspace)
    keep = request.keep == "all"
    try:
        ending, snapshot = await run.harness(harness, listener_handler)
        report = call_report()
        # Before the grader can write there.
        told = await asyncio.to_thread(told_by, harness, snapshot, run.log) if snapshot is not None else None
        ending = _with_report(ending, report)
        grade = None
        if snapshot is not None and before_grading(ending) is None:
            grade = await run.grade(snapshot)
            run.mark()
            if grade is None:
                ending = _overall_timeout(ending)
        verdict = judge(ending, grade)
        keep = keep or (request.keep == "failed" and verdict.outcome != "graded")
        return ExecutionResult(
            outcome=verdict.outcome,
            reason=verdict.reason,
            reward=verdict.reward,
            seconds=_phases(run.marks),
            exit=ending.exit,
            model_calls=report.model_calls,
            log=run.log if keep or request.log else None,
            workspace=run.workspace if keep else None,
            detail=run.detail or (grade.detail if grade else ""),
            told=told,
            interrupted=ending.interrupted,
        )
    finally:
        if not keep:
            await finish(asyncio.to_thread(remove_tree, run.workspace))


def _with_report(ending: Ending, report: CallReport) -> Ending:
    return Ending(
        image_error=ending.image_error,
        sandbox_error=ending.sandbox_error,
        overall_timeout=ending.overall_timeout,
        exit=ending.exit,
        model_calls=report.model_calls,
        server_error=report.server_error,
        interrupted=ending.interrupted,
        unhealthy=ending.unhealthy and not report.model_calls,
    )


def _overall_timeout(ending: Ending) -> Ending:
    return Ending(exit=ending.exit, model_calls=ending.model_calls, overall_timeout=True)


def _phases(marks: list[float]) -> Phases:
    return Phases(*(later - earlier for earlier, later in pairwise(marks)))


def _close(listener: socket.socket | None) -> None:
    if listener is not None:
        listener.close()
