"""A cell's engines, as its lead sees them: they serve together or not at all.

Owns the cell's `EngineChild`ren, and says where each answers. Invariants: what is asked of the gang is asked of every
engine, at once; an engine that fails what it was asked is ended, and starts again with the next push; a push counts
when every engine reports its version.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from gyre.engines.errors import EngineError
from gyre.engines.sglang.arguments import Store
from gyre.ledger import events as ev
from gyre.processes.base import Process
from gyre.processes.children import Child
from gyre.processes.engine_child import EngineChild
from gyre.processes.parts import Nodes, Part
from gyre.processes.seeds import seed_of
from gyre.recipe.places import engine_places

log = logging.getLogger("gyre")

WATCH_SECONDS = 0.2


class Ask(Protocol):
    """One operation of the cell's trainer ranks."""

    async def __call__(self, op: str, **arguments: Any) -> dict[str, Any]: ...


class Gang:
    """The engines of the cell that `lead` leads; `nodes` are its further nodes."""

    def __init__(self, lead: Process, nodes: Nodes, kind: Callable[..., EngineChild] = EngineChild) -> None:
        self._lead, self._nodes = lead, nodes
        run, model, logs = lead.run, Path(lead.job.model), lead.run.log_dir(lead.job.attempt)
        names = {place: f"{lead.name}-engine-{place.engine}" for place in engine_places(lead.recipe)}
        weights_key = secrets.token_urlsafe(24)
        self.engines = [
            kind(run, lead.recipe, model, name, logs / f"{name}.log", place, nodes, weights_key)
            for place, name in names.items()
        ]

    @property
    def holds_memory(self) -> bool:
        return any(engine.running and not engine.released for engine in self.engines)

    async def start(self, version: str = "") -> None:
        """Start those that do not run, and say where each answers. Raises ChildDied and UserError.

        The store of KV pages, if the run has one, comes first: an engine joins it when it starts. Weights are those of
        another cell's engine that serves `version`, where engines can take them from each other.
        """
        lead, down = self._lead, [engine for engine in self.engines if not engine.running]
        if not down:
            return
        if lead.job.stores:
            await lead.until(lambda: lead.state.store)
        await self._nodes.come()
        await asyncio.gather(*(self._start(engine, version) for engine in down))

    async def _start(self, engine: EngineChild, version: str) -> None:
        lead, number = self._lead, engine.place.engine
        if lead.job.stores:
            engine.store = Store(lead.state.store, lead.run.path.name)
        if lead.recipe.rollout.weights == "mooncake":
            engine.seed = seed_of(lead.state, lead.run, lead.name, version, number)
        await engine.start()
        pid = engine.child.pid if engine.child is not None else 0
        lead.say(ev.EngineStarted(engine=number, url=engine.url, key_file=engine.key_file, pid=pid))

    async def drain(self) -> None:
        """Cut the calls in flight of those that can have any."""
        await self._each([engine for engine in self.engines if not engine.released], lambda engine: engine.drain())

    async def release(self) -> None:
        """Give the memory back."""
        await self._each([engine for engine in self.engines if not engine.released], lambda engine: engine.release())

    async def push(self, ask: Ask, order: ev.ServeOrdered) -> None:
        """Engines that serve what is ordered, by the trainer's weights. Raises EngineError when one does not: it is
        ended, and the next push starts it again; and ChildDied when one does not start."""
        await self.start(order.weight_version)
        self._all(await self._each(self.engines, lambda engine: engine.resume()))
        late = [engine for engine in self.engines if engine.loaded != order.weight_version]
        if not late:
            return
        for engine in late:
            engine.loaded = ""
        told = [{"name": e.name, "url": e.url, "key_file": e.key_file, "shares": e.shares} for e in late]
        pushed = await ask("push", manifest=order.manifest, engines=told, weight_version=order.weight_version)
        failures: dict[str, str] = pushed.get("engines_failed", {})

        async def has_it(engine: EngineChild) -> None:
            if engine.name in failures:
                raise EngineError(failures[engine.name])
            if not failures and await engine.version() != order.weight_version:
                raise EngineError(f"it does not report {order.weight_version}")

        self._all(await self._each(late, has_it))

    def _all(self, failed: list[str]) -> None:
        if failed:
            raise EngineError(f"not with {', '.join(failed)}")

    async def _each(self, engines: Iterable[EngineChild], work: Callable[[EngineChild], Awaitable[None]]) -> list[str]:
        """At once; the names of those that failed, which are ended. So is what is left of one that does not run."""

        async def one(engine: EngineChild) -> str:
            try:
                if engine.running:
                    await work(engine)
                if engine.running or engine.child is None:
                    return ""
                reason = "it has ended"
            except EngineError as error:
                reason = str(error)
            log.error("%s fails what it is asked (%s): ending it", engine.name, reason)
            await engine.close()
            return engine.name

        return [name for name in await asyncio.gather(*(one(engine) for engine in engines)) if name]

    async def watch(self, tell: Callable[[Child | Part], None]) -> None:
        """For ever: tell, once, of each engine that ends."""
        await asyncio.gather(*(self._watch(engine, tell) for engine in self.engines))

    async def _watch(self, engine: EngineChild, tell: Callable[[Child | Part], None]) -> None:
        told: Child | Part | None = None
        while True:
            child = engine.child
            if child is not None and child is not told:
                await child.wait()
                told = child
                tell(child)
            await asyncio.sleep(WATCH_SECONDS)

    def has(self, child: Child | Part) -> bool:
        """Is it the process of one of the engines, and not a predecessor's?"""
        return any(engine.child is child for engine in self.engines)

    async def close(self) -> None:
        await asyncio.gather(*(engine.close() for engine in self.engines))
