"""Real harnesses in the real sandbox, against the proxy and an engine that replies by rule."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gyre.engines.errors import EngineRefused
from gyre.engines.types import GenerateChunk, GenerateRequest
from gyre.errors import UserError
from gyre.executions.bubblewrap import Bubblewrap
from gyre.executions.execution import CallReport, ExecutionRequest, ExecutionResult, Timeouts, run_execution
from gyre.executions.harnesses import Launch, LaunchRequest, find_harness
from gyre.executions.limits import MIB, Limits
from gyre.executions.tasks import Task, load_task
from gyre.ledger.turns import Turn
from gyre.ledger.turns_merge import latest_rows
from gyre.processes.worker import transcript_count
from gyre.proxy.capture import Limits as CallLimits
from gyre.proxy.routes import Route
from gyre.proxy.template import Renderer
from gyre.trajectory.samples import select_execution
from gyre.trajectory.settings import Settings
from tests.proxy.conftest import KEY, V2, FakeEngine, Script, World, _At

Rule = Callable[[str, int], list[Script]]
"""(prompt's text, number of the call) -> what the engine does: a call that is cut goes on with the next."""
KEEP_ALIVE = 0.5
LIMITS = Limits(memory=3000 * MIB, processes=400, disk=900 * MIB, open_files=4096, log=16 * MIB)


class RuledEngine(FakeEngine):
    """Replies by rule; calls are counted as they arrive."""

    rule: Rule
    count = 0

    def at(self, route: Route) -> Any:
        return _Ruled(self, route)


class _Ruled:
    def __init__(self, engine: RuledEngine, route: Route) -> None:
        self.engine, self.route = engine, route

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        engine = self.engine
        if not engine.scripts:
            engine.scripts += engine.rule(engine.renderer.decode(request.input_ids), engine.count)
            engine.count += 1
        failing = engine.scripts[0].error is not None
        try:
            async for chunk in _At(engine, self.route).generate(request):
                yield chunk
        finally:
            if failing:
                # Nothing was sampled: as if it had not been asked.
                engine.requests.pop()


class _Told:
    """A harness that is told how long a context may be."""

    def __init__(self, harness: Any, context: int) -> None:
        self._harness, self._context = harness, context

    def prepare(self, request: LaunchRequest) -> Launch:
        return self._harness.prepare(msgspec.structs.replace(request, context=self._context))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._harness, name)


class Lab:
    """Runs a harness once."""

    def __init__(self, root: Path, renderer: Renderer) -> None:
        self.root, self.renderer = root, renderer
        self.world: World | None = None

    def installed(self, name: str, version: str) -> Any:
        harness = find_harness(name)
        try:
            harness.check(version)
        except UserError as missing:
            pytest.skip(str(missing))
        return harness

    def task(self, instruction: str) -> Any:
        folder = self.root / "tasks" / "task"
        files = {
            "instruction.md": instruction,
            "task.toml": 'schema_version = "1.0"\n',
            "tests/test.sh": "#!/bin/bash\n[ -e out.txt ] && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n",
            "environment/Dockerfile": "FROM debian:12\nWORKDIR /app\n",
        }
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        (folder / "tests/test.sh").chmod(0o755)
        return load_task(folder)

    async def run(
        self,
        name: str,
        version: str,
        rule: Rule,
        seconds: float = 240,
        told_context: int = 0,
        task: Task | None = None,
        **limits: Any,
    ) -> ExecutionResult:
        harness = _Told(self.installed(name, version), told_context)
        bounds = {"context": 900_000, "max_tokens": 4000, "call_seconds": 120.0, **limits}
        engine = RuledEngine(self.renderer)
        engine.rule = rule
        world = self.world = World(self.renderer, CallLimits(**bounds), KEEP_ALIVE, engines=engine.at, harness=name)
        world.engine = engine

        async def serve(listener: socket.socket) -> None:
            await world.proxy.add_listener(listener, KEY)

        request = ExecutionRequest(
            name=f"{name}-1.0",
            task=task or self.task("Make out.txt.\n"),
            key=KEY,
            model="gyre-test",
            timeouts=Timeouts(harness=seconds, grader=30, execution=seconds + 60),
            limits=LIMITS,
            max_turns=60,
            max_tokens=4000,
            keep="all",
            log=self.root / "harness.log",
        )
        try:
            return await run_execution(
                request,
                harness,
                Bubblewrap(),
                self.root,
                serve,
                _reports(world),
            )
        finally:
            await world.proxy.close()

    def output(self, session: int = 1) -> str:
        name = "harness.log" if session == 1 else f"harness.log-{session}"
        return (self.root / name).read_text(errors="replace")


def _reports(world: World) -> Callable[[], CallReport]:
    """What each session's calls were; the one failure is ours on purpose, and the harness must get over it."""
    seen = 0

    def report() -> CallReport:
        nonlocal seen
        before, seen = seen, world.capture.stats.calls
        return CallReport(seen - before, world.capture.stats.server_errors > 1)

    return report


class Play:
    """What the model says in one session: `reply` decides, from the prompt's text; `steps` is the main agent's script.

    Numbers of calls: at SLOW the engine takes long, so that keep-alives go out; at FAIL it refuses, and the harness
    tries again; at SWITCH the cell leaves in the middle, and the call goes on elsewhere, with other weights.
    """

    SLOW, FAIL, SWITCH = 2, 4, 6

    def __init__(self, lab: Lab, steps: list[str]) -> None:
        self.lab, self.steps = lab, iter(steps)
        self.inner = self.summaries = 0

    def reply(self, text: str) -> str:
        raise NotImplementedError

    def __call__(self, text: str, number: int) -> list[Script]:
        if number == self.FAIL:
            return [Script("", error=EngineRefused("out of order", 500))]
        said = self.reply(text)
        if number == self.SLOW:
            gate = asyncio.Event()
            asyncio.get_running_loop().call_later(KEEP_ALIVE * 4, gate.set)
            return [Script(said, chunk=64, gate=gate)]
        if number != self.SWITCH:
            return [Script(said, chunk=64)]
        world = self.lab.world
        assert world is not None
        ids = self.lab.renderer.encode(said)
        world.serve("cell-1", V2)
        world.routes.set("g00001-00", "cell-1")
        return [Script(said, cut=7), Script(self.lab.renderer.decode(ids[7:]), chunk=64)]


def check_session(
    lab: Lab,
    result: ExecutionResult,
    play: Play,
    *,
    sub_agent: int = 0,
    summaries: bool = False,
    auxiliary: bool = False,
    malformed: int = 0,
    forks: set[int] | None = None,
    transcript: bool = True,
) -> list[Turn]:
    """What every session must show: it ended well; at least 20 turns, tokens exact, one switch in mid-call; the roles
    that it has, with `sub_agent` turns of a sub-agent; no fork but where a conversation begins or a summary replaces it
    (`forks`: those turns, where the harness has others); and the harness's own `transcript`, where it
    keeps one, counts what the ledger does.
    """
    world = lab.world
    assert world is not None
    assert (result.outcome, result.reason, result.reward) == ("graded", "finished", 1.0), lab.output()[-3000:]
    rows = check_exact(world, malformed)
    roles = [row.role for row in rows]
    assert len(rows) >= 20
    wanted = {"main"} | ({"sub-agent"} if sub_agent else set()) | ({"main-summary"} if summaries else set())
    assert set(roles) - ({"auxiliary"} if auxiliary else set()) == wanted, roles
    assert roles.count("sub-agent") == sub_agent
    assert (play.summaries >= 1) == summaries
    assert any(len(row.spans) == 2 for row in rows)
    broken = {row.turn for row in rows if row.parent < 0 or row.keep < len(world.whole(row.parent))}
    begin = _beginnings(rows) if forks is None else forks
    # A summary is asked on top of its conversation, or in one of its own.
    assert begin <= broken <= begin | {row.turn for row in rows if row.role == "main-summary"}, (broken, roles)
    count = transcript_count(result.told, world.capture.stats)
    assert (count is not None and count.equal) if transcript else count is None, count
    return rows


def _beginnings(rows: list[Turn]) -> set[int]:
    """The first turn of each thread, and what follows a summary."""
    found = set({row.thread: row.turn for row in reversed(rows)}.values())
    after = False
    for row in rows:
        if row.role == "main-summary":
            after = True
        elif row.role == "main" and after:
            found.add(row.turn)
            after = False
    return found


def check_exact(world: World, malformed: int = 0, faults: int = 1) -> list[Turn]:
    """Each turn's tokens are those that the engine was sent and sampled, bit for bit, and all of them are trained;
    `faults`: of ours on purpose, of each kind."""
    asked: dict[tuple[int, ...], list[list[int]]] = {}
    for request, sampled in zip(world.engine.requests, world.engine.given, strict=True):
        asked.setdefault(tuple(request.input_ids), []).append(sampled)
    stats = world.capture.stats
    counted = (stats.server_errors, stats.continuations, stats.malformed_calls, stats.dangling)
    assert counted == (faults, faults, malformed, 0)
    rows = latest_rows(world.sink.rows)
    assert {row.status for row in rows} == {"committed"}
    for row in rows:
        whole = tuple(world.whole(row.turn))
        at = len(whole) - len(row.output)
        while at < len(whole):
            sampled = asked[whole[:at]].pop(0)
            assert list(whole[at : at + len(sampled)]) == sampled
            at += len(sampled)
    assert not any(asked.values())
    assert sum(len(row.output) for row in rows) == stats.tokens_sampled
    settings = Settings(seed=1, tokens_per_microstep=1_000_000, max_paths=1000)
    samples, dropped = select_execution(
        rows, settings, execution=rows[0].execution, attempt=0, advantage=1.0, dispatch_version=1
    )
    auxiliary = sum(len(row.output) for row in rows if row.role == "auxiliary")
    assert dropped == ({"auxiliary": auxiliary} if auxiliary else {})
    assert sum(sample.targets for sample in samples) + auxiliary == stats.tokens_sampled
    return rows
