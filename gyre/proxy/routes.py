"""Which engine serves which execution, as this worker knows it.

The worker feeds it from the scheduler's lines; calls wait on it. Invariants: `current` only ever gives a route
whose cell is serving; an execution without one waits. The cell is decided elsewhere; which one of the cell's engines,
here: as long as an execution stays in a cell it goes to the same one, which has its prefix.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence

import msgspec


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """An engine of a cell, counted from 0. `weight_version` is what it must report for every token, and the cache
    salt; `epoch` tells reigns apart.
    """

    url: str
    key: str
    weight_version: str
    cell: str
    epoch: int = 0
    engine: int = 0

    def __repr__(self) -> str:
        # The key must not reach a log.
        place = f"cell={self.cell!r}, engine={self.engine}, epoch={self.epoch}"
        return f"Route({self.url!r}, {self.weight_version!r}, {place})"


def choose(execution: str, loads: Sequence[int]) -> int:
    """Which of a cell's engines takes an execution, given how many of this worker's executions each has: the one with
    the fewest. Between equals the execution's name decides, so that several workers do not all begin with the same."""
    start = zlib.crc32(execution.encode()) % len(loads)
    return min(range(len(loads)), key=lambda engine: (loads[engine], (engine - start) % len(loads)))


class Routes:
    """Execution -> cell, and cell -> routes to its engines while it serves. One event loop."""

    def __init__(self) -> None:
        self._cells: dict[str, str] = {}
        self._engines: dict[str, int] = {}
        """Execution -> which engine of its cell, once it was asked for."""
        self._serving: dict[str, tuple[Route, ...]] = {}
        self._changed = asyncio.Event()

    def set(self, execution: str, cell: str) -> None:
        """Route `execution` to `cell`; "" takes its route away."""
        if cell != self._cells.get(execution, ""):
            self._engines.pop(execution, None)
        if cell:
            self._cells[execution] = cell
        else:
            self._cells.pop(execution, None)
        self._notify()

    def set_serving(self, cell: str, *engines: Route) -> None:
        """`cell` serves with these engines, or (none) does not serve."""
        if engines:
            self._serving[cell] = engines
        else:
            self._serving.pop(cell, None)
        self._notify()

    def forget(self, execution: str) -> None:
        """Drop the route of an execution that ended."""
        self._cells.pop(execution, None)
        self._engines.pop(execution, None)

    def peek(self, execution: str) -> Route | None:
        """The route of `execution`, if its cell serves."""
        cell = self._cells.get(execution, "")
        engines = self._serving.get(cell)
        if not engines:
            return None
        chosen = self._engines.get(execution, len(engines))
        if chosen >= len(engines):
            chosen = self._engines[execution] = choose(execution, self._loads(cell, len(engines)))
        return engines[chosen]

    def _loads(self, cell: str, engines: int) -> list[int]:
        loads = [0] * engines
        for execution, engine in self._engines.items():
            if engine < engines and self._cells.get(execution) == cell:
                loads[engine] += 1
        return loads

    async def current(self, execution: str) -> Route:
        """The route of `execution`; waits while its cell does not serve."""
        while (route := self.peek(execution)) is None:
            await self._changed.wait()
        return route

    async def other(self, execution: str, than: Route, patience: float) -> None:
        """Wait until the route of `execution` is another one than `than`, at most `patience` seconds."""
        try:
            async with asyncio.timeout(patience):
                while self.peek(execution) == than:
                    await self._changed.wait()
        except TimeoutError:
            return

    async def left(self, execution: str, route: Route) -> None:
        """Returns once `execution` does not go by `route` any more: its cell leaves, or closes for an update."""
        while self.peek(execution) == route:
            await self._changed.wait()

    def _notify(self) -> None:
        # Everyone who waits now wakes; later waiters wait for the next change.
        self._changed.set()
        self._changed = asyncio.Event()
