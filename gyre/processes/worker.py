"""A worker: runs executions on its node, with its own proxy and its own trajectory shards.

Owns the journal `worker-<i>` and the shards of that name. Invariants: an execution's turns are on the disk before its
end is journalled; a harness reaches the proxy with its own key through its own socket only; routes are acknowledged
after calls go by them.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import secrets
import socket
import time
from pathlib import Path

import aiohttp
from msgspec import structs

from gyre.engines.client import EngineClient, vocabulary
from gyre.executions.execution import (
    CallReport,
    ExecutionRequest,
    ExecutionResult,
    Timeouts,
    run_execution,
)
from gyre.executions.harnesses import Harness, find_harness
from gyre.executions.images.prepare import unpack_all
from gyre.executions.images.store import recipe_images
from gyre.executions.layers import remove_tree
from gyre.executions.limits import recipe_limits
from gyre.executions.sandbox import Sandbox, make_sandbox
from gyre.executions.tasks import Task, load_tasks
from gyre.executions.transcripts import Told
from gyre.ledger import events as ev
from gyre.ledger.files import write_error
from gyre.ledger.layout import RunFolder
from gyre.ledger.routing import RoutingWriter
from gyre.ledger.shards import TurnWriter
from gyre.ledger.state import RunState
from gyre.ledger.tail import Line
from gyre.processes.base import Process, run_process
from gyre.proxy.capture import Capture, Limits, Stats
from gyre.proxy.generate import Generator
from gyre.proxy.heap import settle
from gyre.proxy.roles import rules_for
from gyre.proxy.routes import Route, Routes
from gyre.proxy.server import Proxy, ProxyExecution
from gyre.proxy.template import load as load_renderer
from gyre.training.architecture import read_architecture

log = logging.getLogger("gyre")

MODEL_NAME = "gyre"
KEY_BYTES = 24
ROOM_BYTES = 1 << 20
"""With less room than this where workspaces lie, what a harness or a grader met is ours, not theirs."""


class Worker(Process):
    """gyre's worker process."""

    def __init__(self, run: RunFolder, name: str) -> None:
        super().__init__(run, name)
        recipe = self.recipe
        self.harness: Harness = find_harness(recipe.harness.name)
        self.tasks: dict[str, Task] = {}
        images = recipe_images(recipe.sandbox)
        for path in filter(None, (recipe.tasks.path, recipe.eval.path)):
            self.tasks |= {t.name: t for t in load_tasks(Path(path), reward=recipe.tasks.reward, images=images)}
        self.rules = rules_for(recipe.harness.name)
        self.renderer = load_renderer(Path(self.job.model), recipe.model.template, secrets.token_hex(8))
        routed = "routing" in recipe.trajectory.record
        self.mixture = read_architecture(Path(self.job.model)).mixture() if routed else None
        self.turns = TurnWriter(run, name, self.incarnation)
        self.routing = RoutingWriter(run, name, self.incarnation) if routed else None
        self.routes = Routes()
        self.root = run.workspaces / name
        self.sandbox: Sandbox | None = None
        self.proxy: Proxy | None = None
        self._clients: dict[tuple[str, str], EngineClient] = {}
        self._vocabulary = vocabulary(Path(self.job.model))
        self._session: aiohttp.ClientSession | None = None
        self._waiting: asyncio.Queue[ev.Dispatch] = asyncio.Queue()
        self._keys: dict[str, str] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._cut = asyncio.Event()

    # ---- the ledger ----

    async def on_lines(self, lines: list[Line]) -> None:
        routed: Line | None = None
        for line in lines:
            event = line.event
            if isinstance(event, ev.Dispatched):
                if (event.worker, event.incarnation) == (self.name, self.incarnation):
                    for dispatch in event.executions:
                        self._waiting.put_nowait(dispatch)
            elif isinstance(event, ev.Routed):
                routed = line
        self._sync_routes()
        if self.state.leaving and self.recipe.tasks.interrupted == "grade":
            self._cut.set()
        if routed is not None and self.accepted:
            self.say(ev.RoutesAcknowledged(epoch=routed.incarnation, n=routed.n))

    def _sync_routes(self) -> None:
        """Bring the proxy's routes to what the ledger says."""
        for cell in self.job.all_cells():
            self.routes.set_serving(cell, *self._routes_of(cell))
        for execution in self.state.open:
            self.routes.set(execution, self.state.routes.get(execution, ""))

    def _routes_of(self, cell: str) -> list[Route]:
        """To each engine of a cell that serves; none when one of them is gone: its cell is about to say so."""
        found = self.state.cell(cell)
        if found is None or found.serving is None:
            return []
        routes = [
            Route(
                url=engine.url,
                key=self._key(engine.key_file),
                weight_version=found.serving.weight_version,
                cell=cell,
                epoch=self.state.incarnation(cell),
                engine=number,
            )
            for number, engine in sorted(found.engines.items())
        ]
        return routes if all(route.key for route in routes) else []

    def _key(self, key_file: str) -> str:
        """The engine's key; "" when the engine is gone and its key file with it: another one will be announced."""
        if key_file not in self._keys:
            try:
                self._keys[key_file] = json.loads((self.run.keys / key_file).read_text())["api_key"]
            except FileNotFoundError:
                return ""
        return self._keys[key_file]

    # ---- work ----

    async def work(self) -> None:
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.harness.check(self.recipe.harness.version)
        check_room(self.root)  # before a sandbox is tried: on a full disk its refusal would name a false reason
        self.sandbox = await make_sandbox(self.recipe.sandbox.kind, self.root)
        await asyncio.to_thread(self._unpack_images)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as self._session:
            self.proxy = self._make_proxy()
            await self.until_accepted()
            for left in lost_workspaces(self.root / "executions", self.state):
                await asyncio.to_thread(remove_tree, left)
            self._sync_routes()
            self.say(ev.WorkerReady(slots=self.recipe.sandbox.per_node))
            self.say(ev.RoutesAcknowledged(epoch=self.state.routed[0], n=self.state.routed[1]))
            try:
                await self._run_all()
            finally:
                for task in self._running:
                    task.cancel()
                await asyncio.gather(*self._running, return_exceptions=True)

    def _unpack_images(self) -> None:
        """Before the first execution needs them; one that fails excludes the executions of its tasks."""
        lying_on = {image: (task.name,) for task in self.tasks.values() for image in task.images}
        for prepared in unpack_all(lying_on):
            if prepared.problem:
                log.warning("%s", prepared.problem)

    async def _run_all(self) -> None:
        """Run what is dispatched, side by side. An error of one is ours, and ends the worker."""
        waiting = asyncio.create_task(self._waiting.get())
        try:
            while True:
                done, _ = await asyncio.wait({waiting, *self._running}, return_when=asyncio.FIRST_COMPLETED)
                for task in done - {waiting}:
                    self._running.discard(task)
                    await task
                if waiting.done():
                    dispatch = waiting.result()
                    self._running.add(asyncio.create_task(self._run(dispatch), name=dispatch.execution))
                    waiting = asyncio.create_task(self._waiting.get())
        finally:
            waiting.cancel()

    def _make_proxy(self) -> Proxy:
        generator = Generator(
            self.routes,
            self._client,
            temperature=self.recipe.rollout.temperature,
            stop_ids=self.renderer.stop_ids,
            decode=self.renderer.decode,
            token_hex=secrets.token_hex,
            now=time.time,
            mixture=self.mixture,
        )
        return Proxy(
            model=MODEL_NAME,
            renderer=self.renderer,
            generator=generator,
            sink=self.turns,
            routing=self.routing,
            temperature=self.recipe.rollout.temperature,
            token_hex=secrets.token_hex,
            now=time.time,
        )

    def _client(self, route: Route) -> EngineClient:
        known = self._clients.get((route.url, route.key))
        if known is None:
            if self._session is None:
                raise RuntimeError("the worker has not started")
            known = EngineClient(route.url, self._session, route.key, None, self._vocabulary)
            self._clients[route.url, route.key] = known
        return known

    async def _run(self, dispatch: ev.Dispatch) -> None:
        """One attempt, from `started` to `finished`."""
        if self.proxy is None or self.sandbox is None:
            raise RuntimeError("the worker has not started")
        self.say(ev.Started(execution=dispatch.execution, attempt=dispatch.attempt), durable=False)
        key = secrets.token_urlsafe(KEY_BYTES)
        capture = self.proxy.register(
            ProxyExecution(
                execution=dispatch.execution,
                attempt=dispatch.attempt,
                key=key,
                limits=Limits(
                    context=self.recipe.rollout.context,
                    max_tokens=self.recipe.harness.max_tokens,
                    call_seconds=self.recipe.tasks.harness_timeout,
                ),
                rules=self.rules,
            )
        )
        began = time.monotonic()
        result = await self._execute(dispatch, key, capture, self.sandbox)
        check_room(self.root)
        self.routes.forget(dispatch.execution)
        if self.routing is not None:
            self.routing.sync()
        self.turns.sync()
        self.say(finished(dispatch, result, capture, time.monotonic() - began))

    async def _execute(self, dispatch: ev.Dispatch, key: str, capture: Capture, sandbox: Sandbox) -> ExecutionResult:
        recipe, proxy = self.recipe, self.proxy
        sockets: list[socket.socket] = []
        ended: list[asyncio.Task[None]] = []
        reported = Stats()

        def report() -> CallReport:
            """The harness is dead: calls that still run are cut, before the grader takes its time."""
            nonlocal reported
            if proxy is not None:
                ended.append(asyncio.create_task(proxy.pause(key)))
            before, reported = reported, structs.replace(capture.stats)
            return CallReport(
                model_calls=reported.calls - before.calls,
                server_error=reported.server_errors > before.server_errors,
            )

        async def listen(listener: socket.socket) -> None:
            """For each session of a harness."""
            nonlocal reported
            if proxy is not None:
                await asyncio.gather(*ended)
                reported = structs.replace(capture.stats)  # what the cut of the one before did is not this one's
                proxy.resume(key)
                await proxy.add_listener(listener, key)
                sockets.append(listener)

        request = ExecutionRequest(
            name=f"{dispatch.execution}.{dispatch.attempt}",
            task=self.tasks[dispatch.task],
            key=key,
            model=MODEL_NAME,
            timeouts=Timeouts(
                harness=recipe.tasks.harness_timeout,
                grader=recipe.tasks.grader_timeout,
                execution=recipe.tasks.execution_timeout,
            ),
            limits=recipe_limits(recipe.sandbox),
            max_turns=recipe.harness.max_turns,
            max_tokens=recipe.harness.max_tokens,
            context=recipe.rollout.context,
            environment=recipe.harness.environment,
            grader_attempts=recipe.tasks.grader_attempts,
            keep=recipe.sandbox.keep_workspaces,
        )
        try:
            return await run_execution(
                request,
                self.harness,
                sandbox,
                self.root,
                listen,
                report,
                self._cut,
            )
        finally:
            await asyncio.gather(*ended)
            if proxy is not None:
                await proxy.unregister(key)
                for listener in sockets:
                    await proxy.remove_listener(listener)

    async def close(self) -> None:
        if self.proxy is not None:
            await self.proxy.close()
        self.turns.close()
        if self.routing is not None:
            self.routing.close()


def lost_workspaces(folder: Path, state: RunState) -> list[Path]:
    """What attempts left that a predecessor did not finish; workspaces that were kept on purpose are not among it."""
    lost = []
    for place in folder.iterdir() if folder.is_dir() else []:
        name, _, number = place.name.rpartition(".")
        execution = state.executions.get(name)
        attempt = execution.attempts.get(int(number)) if execution is not None and number.isdigit() else None
        if attempt is None or attempt.finished is None:
            lost.append(place)
    return lost


def check_room(folder: Path) -> None:
    """An execution that ends on a full disk says nothing about its task. Raises LedgerWriteError: it runs again."""
    found = os.statvfs(folder)
    if found.f_bavail * found.f_frsize < ROOM_BYTES or (found.f_files and not found.f_favail):
        raise write_error(folder, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))


def finished(dispatch: ev.Dispatch, result: ExecutionResult, capture: Capture, seconds: float) -> ev.Finished:
    """The terminal line of an attempt."""
    return ev.Finished(
        execution=dispatch.execution,
        attempt=dispatch.attempt,
        outcome=result.outcome,
        reason=result.reason + (f": {result.detail}" if result.detail else ""),
        reward=result.reward,
        timed_out=result.exit.timed_out,
        interrupted=result.interrupted,
        turns=capture.stats.turns,
        tokens_sampled=capture.stats.tokens_sampled,
        seconds=seconds,
        phases={
            "prepare": result.seconds.prepare,
            "run": result.seconds.run,
            "grade": result.seconds.grade,
        },
        transcript=transcript_count(result.told, capture.stats),
        steps=[ev.StepEnd(**structs.asdict(step)) for step in result.steps],
    )


def transcript_count(told: Told | None, stats: Stats) -> ev.TranscriptCount | None:
    """The harness's counts beside ours of the same roles."""
    if told is None:
        return None
    return ev.TranscriptCount(
        calls=told.calls,
        tokens=told.tokens,
        turns=sum(stats.roles[role][0] for role in told.call_roles if role in stats.roles),
        sampled=sum(stats.roles[role][1] for role in told.token_roles if role in stats.roles),
    )


if __name__ == "__main__":
    settle()
    run_process(Worker)
