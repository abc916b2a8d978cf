"""Executions that run: who is served where, how fast, and who ends next.

Owns the progress of every running execution. A cell's clock counts seconds of service that each of its executions has
had; it stands still while the cell does not serve, and slows down when the cell is overloaded (if the workload says
so). Invariant: an execution ends once, after exactly its seconds of service or at its deadline, whichever comes first,
however often it moves. No time passes in here by itself: the caller says what time it is.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from gyre.simulate.jobs import Job
from gyre.simulate.workload import Cells


@dataclass(slots=True)
class Running:
    """`ends`: what the clock of its cell shows when it is done; `left`: service it needs, while it has no cell."""

    name: str
    attempt: int
    job: Job
    started: float
    cell: str = ""
    left: float = 0.0
    ends: float = 0.0


@dataclass(slots=True)
class Clock:
    """The service clock of one cell. `open`: it serves, or is about to, so that executions may begin."""

    open: bool = False
    serving: bool = False
    shows: float = 0.0
    at: float = 0.0
    speed: float = 0.0
    members: int = 0
    queue: list[tuple[float, int, Running]] = field(default_factory=list)
    stamp: int = 0


@dataclass(frozen=True, slots=True)
class Ended:
    """`share`: how much of its service it had: below 1 when its deadline cut it."""

    running: Running
    seconds: float
    share: float


class Rollout:
    """All cells' service. `alarm(at, cell, stamp)` asks to be called back with `due`."""

    def __init__(self, cells: Cells, names: tuple[str, ...], alarm: Callable[[float, str, int], None]) -> None:
        self._cells = cells
        self._clocks = {name: Clock() for name in names}
        self._alarm = alarm
        self._waiting: deque[Running] = deque()
        self._order = 0
        self.running: dict[str, Running] = {}
        self.routes: dict[str, str] = {}
        self.served = 0.0
        """Seconds of service given to all executions that ended."""

    # ---- what happens ----

    def dispatch(self, name: str, attempt: int, job: Job) -> None:
        self._waiting.append(Running(name, attempt, job, started=-1.0, left=job.seconds))

    def route(self, name: str, cell: str, now: float) -> None:
        self.routes[name] = cell
        found = self.running.get(name)
        if found is not None and found.cell != cell:
            moved = bool(found.cell)
            self._leave(found, now)
            found.left += self._cells.reroute if moved else 0.0
            self._join(found, cell, now)

    def serve(self, cell: str, serving: bool, now: float) -> None:
        clock = self._clocks[cell]
        if clock.serving != serving:
            self._wind(clock, now)
            clock.serving = serving
            self._pace(cell, clock)

    def open(self, cell: str, is_open: bool) -> None:
        self._clocks[cell].open = is_open

    def admit(self, now: float) -> list[Running]:
        """Start waiting executions while there is room; returns those that began now."""
        begun: list[Running] = []
        room = self._room()
        if room and self._cells.overload == "slow":
            room = len(self.running) + len(self._waiting)
        while self._waiting and len(self.running) < room:
            found = self._waiting.popleft()
            found.started = now
            self.running[found.name] = found
            self._join(found, self.routes.get(found.name, ""), now)
            begun.append(found)
        return begun

    def due(self, cell: str, stamp: int, now: float) -> list[Ended]:
        """An alarm rings: the executions of `cell` that are done. Alarms of an older stamp mean nothing."""
        clock = self._clocks[cell]
        if clock.stamp != stamp:
            return []
        self._wind(clock, now)
        ended = []
        while (head := self._head(clock)) is not None and head.ends <= clock.shows + 1e-6:
            ended.append(self._end(head, now, 1.0))
        self._pace(cell, clock)
        return ended

    def deadline(self, name: str, attempt: int, now: float) -> Ended | None:
        """Its time on the wall is over: it is cut, if it still runs."""
        found = self.running.get(name)
        if found is None or found.attempt != attempt:
            return None
        self._leave(found, now)
        share = 1.0 - max(0.0, found.left) / found.job.seconds if found.job.seconds else 1.0
        return self._end(found, now, max(0.0, share))

    # ---- service ----

    def _room(self) -> int:
        return self._cells.executions_per_cell * sum(1 for clock in self._clocks.values() if clock.open)

    def _join(self, found: Running, cell: str, now: float) -> None:
        found.cell = cell
        clock = self._clocks.get(cell)
        if clock is None:
            return
        self._wind(clock, now)
        found.ends = clock.shows + found.left
        self._order += 1
        heapq.heappush(clock.queue, (found.ends, self._order, found))
        clock.members += 1
        self._pace(cell, clock)

    def _leave(self, found: Running, now: float) -> None:
        cell = found.cell
        clock = self._clocks.get(cell)
        if clock is None:
            return
        self._wind(clock, now)
        found.left, found.cell = found.ends - clock.shows, ""
        clock.members -= 1
        self._pace(cell, clock)

    def _end(self, found: Running, now: float, share: float) -> Ended:
        del self.running[found.name]
        self.routes.pop(found.name, None)
        clock = self._clocks.get(found.cell)
        if clock is not None:
            clock.members -= 1
            found.cell = ""
        self.served += found.job.seconds * share
        return Ended(found, now - found.started, share)

    @staticmethod
    def _head(clock: Clock) -> Running | None:
        """The next to end among those that are still here."""
        queue = clock.queue
        while queue:
            ends, _, found = queue[0]
            if found.cell and found.ends == ends:
                return found
            heapq.heappop(queue)
        return None

    @staticmethod
    def _wind(clock: Clock, now: float) -> None:
        clock.shows += (now - clock.at) * clock.speed
        clock.at = now

    def _pace(self, cell: str, clock: Clock) -> None:
        """After any change: the clock's speed, and the alarm for the next end."""
        clock.speed = self._speed(clock)
        clock.stamp += 1
        head = self._head(clock) if clock.speed else None
        if head is not None:
            self._alarm(clock.at + max(0.0, head.ends - clock.shows) / clock.speed, cell, clock.stamp)

    def _speed(self, clock: Clock) -> float:
        """1 within its room; beyond, only tools run at full speed."""
        if not clock.serving:
            return 0.0
        crowd = clock.members / self._cells.executions_per_cell
        if crowd <= 1.0 or self._cells.overload == "queue":
            return 1.0
        generating = self._cells.generation_share
        return 1.0 / (generating * crowd + 1.0 - generating)
