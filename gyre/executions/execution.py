"""Runs one execution: workspace, then for each of its parts sandbox, harness, snapshot and grade; outcome.

Owns the order of these and the workspace folder. Invariants: on every path, cancellation included, no process
of the execution is left when `run_execution` returns; nothing is graded before everything in the sandbox is
dead; what a grader does to the workspace no later part sees; the key is written to no file.
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
from gyre.executions.outcome import Ending, Outcome, Verdict, before_grading, judge, not_laid_out, of_all
from gyre.executions.sandbox import Bind, ExitStatus, RunningSandbox, Sandbox, SandboxFailure, SandboxSpec
from gyre.executions.steps import FILES, Part, below, combined, parts
from gyre.executions.succession import Left, upper_after
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
    """What the proxy saw of the execution since the last report."""

    model_calls: int
    server_error: bool = False
    """The harness got a server error or a broken stream from us and did not get over it."""


class Phases(Struct, frozen=True):
    """Wall seconds, of all parts together."""

    prepare: float = 0.0
    run: float = 0.0
    grade: float = 0.0

    @property
    def each(self) -> tuple[float, float, float]:
        return self.prepare, self.run, self.grade


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


class StepEnd(Struct, frozen=True, kw_only=True):
    """How one step ended; `rewards` is what its grader gave, by name. Wall seconds."""

    name: str
    outcome: Outcome
    reason: str
    reward: float | None
    rewards: dict[str, float]
    model_calls: int
    seconds: float


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
    steps: tuple[StepEnd, ...] = ()
    """Of a task of several steps, those that ran."""


class _Session(Struct, frozen=True, kw_only=True):
    """One part, ended and, where it could be, graded."""

    part: Part
    ending: Ending
    grade: Grade | None
    verdict: Verdict
    seconds: Phases
    told: Told | None


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
        self.parts = parts(request.task)
        self.sessions: list[_Session] = []
        self.before: Left | None = None

    @property
    def snapshot(self) -> Path:
        """What the last sandbox left; the next one goes on with it."""
        return self.workspace / "snapshot"

    def place_of_log(self) -> Path:
        number = len(self.sessions)
        return self.log.with_name(f"{self.log.name}-{number + 1}") if number else self.log

    def mark(self) -> None:
        """End of a phase."""
        self.marks.append(self.loop.time())

    def left(self) -> float:
        """Seconds of the execution's overall time."""
        return max(0.0, self.started + self.request.timeouts.execution - self.loop.time())

    def place(self, name: str) -> Path:
        """Of a file or folder of the part in hand."""
        number = len(self.sessions)
        return self.workspace / (f"{name}-{number + 1}" if number else name)

    def spec(self, part: Part, launch: Launch, port: int, listener: socket.socket | None) -> SandboxSpec:
        """Make the workspace's folders and write the launch's files. Raises OSError."""
        scratch, files = (private_folder(self.place(name)) for name in ("scratch", "files"))
        binds = [Bind(part.files, FILES)] if part.files is not None else []
        binds += launch.binds
        for number, (target, text) in enumerate(launch.files.items()):
            source = files / str(number)
            source.write_text(text, encoding="utf-8")
            binds.append(Bind(source, target))
        task = part.task
        for each in self.parts:  # one that is unknown: told before the agent works
            self.sandbox.user(self.root, each.task, each.task.agent_user)
            self.sandbox.user(self.root, each.task.grader, each.task.grader.verifier_user)
        user, upper = self.sandbox.user(self.root, task, task.agent_user), self.workspace / "upper"
        below, resumed = upper_after(self.before, upper, user)
        self.before = Left(snapshot=self.snapshot, below=below, user=user)
        return SandboxSpec(
            lowers=self.sandbox.lowers(self.root, task, below),
            upper=upper,
            scratch=scratch,
            workdir=task.workdir,
            argv=launch.argv,
            log=self.place_of_log(),
            binds=tuple(binds),
            env={**task.env, **launch.env, **part.env},
            listen_port=port,
            listener=listener,
            limits=self.limits,
            before=part.before,
            resumed=resumed,
            image=task.on_image,
            user=user,
        )

    async def harness(self, part: Part, harness: Harness, handler: ListenerHandler) -> tuple[Ending, bool]:
        """Prepare, start, wait and kill; the ending without the proxy's part, and whether there is a snapshot."""
        request = self.request
        port, listener = self.sandbox.open_listener()
        try:
            launch = harness.prepare(
                LaunchRequest(
                    task=part.task,
                    port=port,
                    key=request.key,
                    model=request.model,
                    max_turns=request.max_turns,
                    max_tokens=request.max_tokens,
                    context=request.context,
                    environment=request.environment,
                )
            )
            spec = await asyncio.to_thread(self.spec, part, launch, port, listener)
        except OSError as error:
            self.detail = str(error)
            _close(listener)
            return not_laid_out(error), False
        try:
            running = await self.sandbox.start(spec)
        except SandboxFailure as failure:
            self.detail = str(failure)
            _close(listener)
            return Ending(sandbox_error=str(failure)), False
        self.mark()
        ending = await self._wait(part, running, handler)
        if part.before and ending.exit.code == UNHEALTHY:
            ending = structs.replace(ending, unhealthy=True)
        running.snapshot(self.snapshot)
        return ending, True

    async def _wait(self, part: Part, running: RunningSandbox, handler: ListenerHandler) -> Ending:
        timeouts, own = self.request.timeouts, part.task.agent_timeout
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

    async def grade(self, task: Task) -> Grade | None:
        """The grade of the snapshot; None when the execution's overall time ran out."""
        request = self.request
        grading = grade_with_retries(
            task,
            self.sandbox,
            self.root,
            self.snapshot,
            self.place("grading"),
            request.limits,
            min(request.timeouts.grader, task.verifier_timeout),
            request.grader_attempts,
            self.before.below if self.before is not None else (),
        )
        try:
            return await asyncio.wait_for(grading, self.left())
        except TimeoutError:
            return None

    async def session(
        self, part: Part, harness: Harness, handler: ListenerHandler, call_report: Callable[[], CallReport]
    ) -> bool:
        """One part, from its sandbox to its grade. True: another one follows it, if the task has one."""
        self.marks = [self.loop.time()]
        ending, snapshot = await self.harness(part, harness, handler)
        report = call_report()
        # Before the grader can write there. Counts of several sessions are not told apart.
        counted = snapshot and len(self.parts) == 1
        told = await asyncio.to_thread(told_by, harness, self.snapshot, self.log) if counted else None
        ending = _with_report(ending, report)
        grade = None
        if snapshot and before_grading(ending) is None:
            grade = await self.grade(part.task)
            self.mark()
            if grade is None:
                ending = _overall_timeout(ending)
        verdict = judge(ending, grade)
        self.sessions.append(
            _Session(part=part, ending=ending, grade=grade, verdict=verdict, seconds=_phases(self.marks), told=told)
        )
        if verdict.outcome != "graded" or ending.interrupted:
            return False
        return grade is not None and not below(grade.rewards, part.min_reward)

    def result(self) -> ExecutionResult:
        """Of the sessions that ran. A workspace is neither kept nor removed yet."""
        last = self.sessions[-1]
        verdict = of_all(
            [session.verdict for session in self.sessions], self._reward(), more=len(self.sessions) < len(self.parts)
        )
        detail = self.detail or (last.grade.detail if last.grade else "")
        failed = verdict.outcome != "graded"
        late = [session.ending.exit for session in self.sessions if session.ending.exit.timed_out]
        return ExecutionResult(
            outcome=verdict.outcome,
            reason=verdict.reason,
            reward=verdict.reward,
            seconds=Phases(*(sum(s.seconds.each[n] for s in self.sessions) for n in range(3))),
            exit=(late or [last.ending.exit])[0],
            model_calls=sum(session.ending.model_calls for session in self.sessions),
            log=None,
            workspace=None,
            detail=last.part.named(detail) if failed else detail,
            told=last.told,
            interrupted=last.ending.interrupted,
            steps=tuple(map(_step_end, self.sessions)) if self.request.task.steps else (),
        )

    def _reward(self) -> float | None:
        """Of the sessions together; None where one has none."""
        grades = [session.grade for session in self.sessions if session.verdict.outcome == "graded"]
        if len(grades) < len(self.sessions):
            return None
        if not self.request.task.steps:
            return self.sessions[-1].verdict.reward
        return combined([grade.rewards for grade in grades if grade is not None], self.request.task.step_reward)


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

    `listener_handler` is called for each part with its sandbox's listening socket; `call_report` after each part, once
    everything in its sandbox is dead. Once `cut` is set, the harness is ended and its workspace graded as it stands.
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
        for part in run.parts:
            if not await run.session(part, harness, listener_handler, call_report):
                break
        result = run.result()
        keep = keep or (request.keep == "failed" and result.outcome != "graded")
        return structs.replace(
            result,
            log=run.log if keep or request.log else None,
            workspace=run.workspace if keep else None,
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


def _step_end(session: _Session) -> StepEnd:
    return StepEnd(
        name=session.part.name,
        outcome=session.verdict.outcome,
        reason=session.verdict.reason,
        reward=session.verdict.reward,
        rewards=session.grade.rewards if session.grade is not None else {},
        model_calls=session.ending.model_calls,
        seconds=sum(session.seconds.each),
    )


def _phases(marks: list[float]) -> Phases:
    return Phases(*(later - earlier for earlier, later in pairwise(marks)))


def _close(listener: socket.socket | None) -> None:
    if listener is not None:
        listener.close()
