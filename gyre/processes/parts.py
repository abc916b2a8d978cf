"""The further nodes of a cell, as its lead sees them: on each an agent, which starts that node's parts at its word.

Owns the orders to the agents. They go through the lead's journal, the agents' answers through theirs. Invariants: a
part ends, for the lead, when its agent says so, when another incarnation of the agent has opened, or when the agent's
counter stands still; an order names the agent's incarnation, so that none is done twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Literal

from msgspec import structs

from gyre.errors import UserError
from gyre.ledger import events as ev
from gyre.ledger.job import agents_of
from gyre.ledger.liveness import LivenessWatch, read_counter
from gyre.ledger.tail import Line
from gyre.processes.address import address_of, meeting_socket
from gyre.processes.base import BEAT_SECONDS, HANGS, Process
from gyre.processes.children import ChildDied

ENDED = 1
"""Status of a part that has ended: nobody here knows its own."""


class Part:
    """What an agent runs for the lead. It is waited for as a child is."""

    def __init__(self, nodes: Nodes, order: ev.PartOrdered) -> None:
        self.order = order
        self.name = f"{order.part} of {order.agent}"
        self.started: asyncio.Future[ev.PartStarted | None] = asyncio.get_running_loop().create_future()
        """What its agent said of an engine that it began; None when it ended before that."""
        self.ended = asyncio.Event()
        self.reason = ""
        self._nodes = nodes

    @property
    def running(self) -> bool:
        return not self.ended.is_set()

    async def wait(self) -> int:
        await self.ended.wait()
        return ENDED

    async def death(self) -> UserError | ChildDied:
        """A user's mistake is told by the agent itself, to the launcher."""
        await self.ended.wait()
        return ChildDied(self.reason)

    async def end(self) -> None:
        """Tell the agent to end it. Nobody waits: the next order of its kind, and engine, ends it too."""
        if self.running:
            with contextlib.suppress(UserError):  # the disk may be full; the agent sees the lead's own end as well
                self._nodes.dismiss(self)

    def lost(self, reason: str) -> None:
        self.reason = self.reason or reason
        self.began(None)
        self.ended.set()

    def began(self, said: ev.PartStarted | None) -> None:
        if not self.started.done():
            self.started.set_result(said)

    @property
    def pid(self) -> int:
        """Of the process, on its node; 0 when nobody has said."""
        said = self.started.result() if self.started.done() else None
        return said.pid if said is not None else 0


class Nodes:
    """`agents`: one for each node of the cell after the first; none when it has one node."""

    def __init__(self, lead: Process) -> None:
        self._lead = lead
        self.nodes = lead.recipe.cells.nodes_per_cell
        self.agents = agents_of(lead.name, self.nodes)
        self._parts: list[Part] = []
        self._orders = 0
        self._counters: dict[str, int | None] = {}
        self._liveness = LivenessWatch(time.monotonic, HANGS * lead.recipe.local.liveness)

    def ranks(self, node: int) -> range:
        """Trainer ranks on a node of the cell, counted from 0."""
        return ranks_on(node, self._lead.recipe.train.ranks, self.nodes)

    async def come(self) -> None:
        """Wait until every agent is accepted and beats: one that another attempt has left does not."""
        before = {agent: self._counter(agent) for agent in self.agents}
        while any(
            self._counter(agent) == before[agent] or not self._incarnation(agent) or not self._newest(agent)
            for agent in self.agents
        ):
            await asyncio.sleep(BEAT_SECONDS / 2)

    def _counter(self, agent: str) -> int | None:
        return read_counter(self._lead.run.alive_path(agent))

    def _incarnation(self, agent: str) -> int:
        return self._lead.state.incarnation(agent)

    def _newest(self, agent: str) -> bool:
        """Has no incarnation opened after the accepted one?"""
        return max(self._lead.state.opened.get(agent, {0: None})) == self._incarnation(agent)

    @contextlib.contextmanager
    def meeting(self) -> Iterator[tuple[str, int]]:
        """Where the ranks of several nodes meet, and the descriptor that listens there; ("", -1) on one node."""
        if not self.agents:
            yield "", -1
            return
        with meeting_socket() as listener:
            yield address_of(listener), listener.fileno()

    def start_ranks(self, rendezvous: str) -> list[Part]:
        """Order them on every further node."""
        return [self._start(agent, "ranks", rendezvous) for agent in self.agents]

    def start_engine(self, node: int, engine: int, key_file: str, rendezvous: str = "") -> Part:
        """Order a node's part of an engine; without a rendezvous, the part that the others are to meet."""
        return self._start(self.agents[node - 1], "engine", rendezvous, engine, key_file)

    def _start(
        self, agent: str, part: Literal["ranks", "engine"], rendezvous: str, engine: int = 0, key_file: str = ""
    ) -> Part:
        self._orders += 1
        made = Part(
            self,
            ev.PartOrdered(
                agent=agent,
                agent_incarnation=self._incarnation(agent),
                part=part,
                number=self._orders,
                rendezvous=rendezvous,
                engine=engine,
                key_file=key_file,
            ),
        )
        self._parts.append(made)
        self._lead.say(made.order)
        return made

    def dismiss(self, part: Part) -> None:
        self._orders += 1
        part.lost("ended by its lead")
        self._lead.say(structs.replace(part.order, number=self._orders, rendezvous="", wanted=False))

    def hear(self, lines: list[Line]) -> None:
        """What agents say of their parts, and of themselves."""
        for line in lines:
            event = line.event
            for part in self._parts:
                order = part.order
                if line.writer != order.agent:
                    continue
                if isinstance(event, ev.Opened) and line.incarnation > order.agent_incarnation:
                    part.lost(f"{order.agent} has ended, and the cell's {order.part} with it")
                elif (
                    isinstance(event, ev.PartStarted | ev.PartEnded)
                    and (event.cell_incarnation, event.number) == (self._lead.incarnation, order.number)
                    and line.incarnation == order.agent_incarnation
                ):
                    if isinstance(event, ev.PartStarted):
                        part.began(event)
                    else:
                        part.lost(event.reason)
        self._parts = [part for part in self._parts if part.running]

    async def watch(self) -> None:
        """For ever: an agent that stands still is lost, with its parts."""
        while True:
            for agent in self.agents:
                self._liveness.observe(agent, self._counter(agent))
                if self._liveness.dead(agent):
                    for part in self._parts:
                        if part.order.agent == agent:
                            part.lost(f"{agent} stands still")
            await asyncio.sleep(BEAT_SECONDS)


def ranks_on(node: int, ranks: int, nodes: int) -> range:
    """As many on each node, in order."""
    each = ranks // nodes
    return range(node * each, (node + 1) * each)
