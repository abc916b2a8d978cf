"""An agent: on each node of a cell after the first, it starts, watches and ends that node's parts at the lead's word.

Owns the journal `agent-<cell>-<node>`, and what its node has of the trainer ranks and of engines. Invariants: it
obeys the newest incarnation of its cell's lead alone; when that one is succeeded, or stands still, its parts are ended;
a part that ends by itself is told once. Parts end with the agent, through its pipes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from pathlib import Path

from gyre.engines.launch import engine_launch, forget_keys
from gyre.engines.sglang.arguments import NO_STORE, EnginePart, Store
from gyre.engines.sglang.store import free_port
from gyre.errors import UserError
from gyre.ledger import events as ev
from gyre.ledger.job import place_of
from gyre.ledger.layout import RunFolder
from gyre.ledger.liveness import LivenessWatch, read_counter
from gyre.ledger.tail import Line
from gyre.processes.address import node_address, node_interface
from gyre.processes.base import BEAT_SECONDS, HANGS, Process, run_process
from gyre.processes.children import Child
from gyre.processes.parts import ranks_on
from gyre.processes.ranks import Ranks
from gyre.recipe.places import engine_places

log = logging.getLogger("gyre")


@dataclass
class Running:
    """A part of this node: what runs, of which order, and who waits for its end."""

    cell_incarnation: int
    number: int
    what: Ranks | Child
    death: asyncio.Task[UserError | Exception]


class Agent(Process):
    """gyre's agent on a further node of a cell."""

    def __init__(self, run: RunFolder, name: str) -> None:
        super().__init__(run, name)
        self.cell, self.node = place_of(name)
        self.parts: dict[tuple[str, int], Running] = {}
        """By kind, and which engine."""
        self.orders: asyncio.Queue[tuple[int, ev.PartOrdered]] = asyncio.Queue()
        self._leads = LivenessWatch(time.monotonic, HANGS * self.recipe.local.liveness)

    async def on_lines(self, lines: list[Line]) -> None:
        for line in lines:
            event = line.event
            if isinstance(event, ev.PartOrdered) and (event.agent, event.agent_incarnation) == (
                self.name,
                self.incarnation,
            ):
                self.orders.put_nowait((line.incarnation, event))

    @property
    def lead(self) -> int:
        """The newest incarnation of the cell's lead."""
        return max(self.state.opened.get(self.cell, {}), default=0)

    async def work(self) -> None:
        await self.until_accepted()
        while True:
            order = asyncio.create_task(self.orders.get())
            deaths = [part.death for part in self.parts.values()]
            await asyncio.wait({order, *deaths}, timeout=BEAT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            await self._look()
            if order.done():
                await self._obey(*order.result())
            else:
                order.cancel()

    async def _look(self) -> None:
        """What has ended is told; what nobody wants any more is ended."""
        self._leads.observe(self.cell, read_counter(self.run.alive_path(self.cell)))
        silent = self._leads.dead(self.cell)
        for which, part in list(self.parts.items()):
            if part.death.done():
                reason = part.death.result()
                await self._end(which)
                if isinstance(reason, UserError):
                    raise reason
                log.error("%s", reason)
                self.say(ev.PartEnded(cell_incarnation=part.cell_incarnation, number=part.number, reason=str(reason)))
            elif silent or part.cell_incarnation != self.lead:
                log.info("%s %s: ending its %s", self.cell, "stands still" if silent else "began afresh", which[0])
                await self._end(which)

    async def _obey(self, incarnation: int, order: ev.PartOrdered) -> None:
        if incarnation != self.lead:
            return
        log.info("%s", order)
        which = (order.part, order.engine)
        await self._end(which)
        if order.wanted:
            start = self._start_ranks if order.part == "ranks" else self._start_engine
            what: Ranks | Child = await start(incarnation, order)
            death: asyncio.Task[UserError | Exception] = asyncio.create_task(what.death())
            self.parts[which] = Running(incarnation, order.number, what, death)

    async def _start_ranks(self, incarnation: int, order: ev.PartOrdered) -> Ranks:
        numbers = ranks_on(self.node, self.recipe.train.ranks, self.recipe.cells.nodes_per_cell)
        return await Ranks.of_cell(self, self.cell, incarnation, numbers, order.rendezvous)

    async def _start_engine(self, incarnation: int, order: ev.PartOrdered) -> Child:
        """An engine has one name on its first node, wherever that is; its parts elsewhere have the agent's too."""
        if self.job.stores:
            await self.until(lambda: self.state.store)
        place, host = engine_places(self.recipe)[order.engine], node_address()
        at = place.nodes.index(self.node)
        rendezvous = order.rendezvous or f"{host}:{free_port(host)}"
        name = f"{self.name if at else self.cell}-engine-{order.engine}"
        forget_keys(self.run.keys, name)
        launch = engine_launch(
            self.recipe,
            Path(self.job.model),
            self.run.keys,
            order.key_file,
            host,
            Store(self.state.store, self.run.path.name) if self.job.stores else NO_STORE,
            EnginePart(len(place.nodes), at, rendezvous, place.gpus),
        )
        log_file = self.run.log_dir(self.job.attempt) / f"{name}.log"
        child = await Child.start(name, launch.argv, log_file, {**launch.env, **node_interface()})
        if not at:
            self.say(
                ev.PartStarted(cell_incarnation=incarnation, number=order.number, rendezvous=rendezvous, pid=child.pid)
            )
        return child

    async def _end(self, which: tuple[str, int]) -> None:
        part = self.parts.pop(which, None)
        if part is not None:
            part.death.cancel()
            await part.what.end()

    async def close(self) -> None:
        for which in list(self.parts):
            await self._end(which)


if __name__ == "__main__":
    run_process(Agent)
