"""Which engine serves which execution, as this worker knows it.

The worker feeds it from the scheduler's lines; calls wait on it. Invariant: `current` only ever gives a route
whose cell is serving; an execution without one waits, and nothing is decided here.
"""

from __future__ import annotations

import asyncio

import msgspec


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """An engine. `weight_version` is what it must report for every token, and the cache salt; `epoch` tells
    reigns apart.
    """

    url: str
    key: str
    weight_version: str
    cell: str
    epoch: int = 0

    def __repr__(self) -> str:
        # The key must not reach a log.
        return f"Route({self.url!r}, {self.weight_version!r}, cell={self.cell!r}, epoch={self.epoch})"


class Routes:
    """Execution -> cell, and cell -> its route while it serves. One event loop."""

    def __init__(self) -> None:
        self._cells: dict[str, str] = {}
        self._serving: dict[str, Route] = {}
        self._changed = asyncio.Event()

    def set(self, execution: str, cell: str) -> None:
        """Route `execution` to `cell`; "" takes its route away."""
        if cell:
            self._cells[execution] = cell
        else:
            self._cells.pop(execution, None)
        self._notify()

    def set_serving(self, cell: str, route: Route | None) -> None:
        """`cell` serves as `route` says, or (None) does not serve."""
        if route is None:
            self._serving.pop(cell, None)
        else:
            self._serving[cell] = route
        self._notify()

    def forget(self, execution: str) -> None:
        """Drop the route of an execution that ended."""
        self._cells.pop(execution, None)

    def peek(self, execution: str) -> Route | None:
        """The route of `execution`, if its cell serves."""
        return self._serving.get(self._cells.get(execution, ""))

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
