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
from gyre.simulate.policies import Progress, StartRule
from gyre.simulate.workload import Cells


@dataclass(slots=True)
class Running:
    """`ends`: what the clock of its cell shows when it is done; `left`: service it needs, while it has no cell."""

    name: str
    attempt: int
    job: Job
    progress: Progress
    started: float = -1.0
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

    def __init__(
        self, cells: Cells, names: tuple[str, ...], rule: StartRule, alarm: Callable[[float, str, int], None]
    ) -> None:
        self._cells = cells
        self._clocks: dict[str, Clock] = {name: Clock() for name in names}
        self._alarm = alarm
        self._rule = rule
        self._waiting: dict[str, deque[Running]] = {}
        """Group -> its executions that have not begun; groups in the order of their dispatch."""
        self._progress: dict[str, Progress] = {}
        self._speed_of_all = 1.0
        """Below 1 when more run than there are rooms, as after the loss of a cell (overload = "queue")."""
        self._order = 0
        self.running: dict[str, Running] = {}
        self.routes: dict[str, str] = {}
        self.served = 0.0
        """Seconds of service given to all executions that ended."""

    # ---- what happens ----

    def plan(self, group: str, burst: int, executions: int) -> None:
        self._progress[group] = Progress(group, burst, executions)

    def dispatch(self, name: str, attempt: int, group: str, job: Job) -> None:
        self._waiting.setdefault(group, deque()).append(self._make(name, attempt, job, self._progress[group]))

    def _make(self, name: str, attempt: int, job: Job, progress: Progress) -> Running:
        return Running(name, attempt, job, progress, left=job.seconds)

    def route(self, name: str, cell: str, now: float) -> None:
        self.routes[name] = cell
        found = self.running.get(name)
        if found is not None and found.cell != cell:
            moved = bool(found.cell)
            self._leave(found, now)
            if moved:
                had = 1.0 - found.left / found.job.seconds if found.job.seconds else 0.0
                self._reroute(found, self._cells.reroute + self._cells.prefill * max(0.0, had))
            self._join(found, cell, now)

    def _reroute(self, found: Running, seconds: float) -> None:
        """Its new cell reads its context anew, or gets its KV."""
        found.left += seconds

    def consumed(self, group: str) -> None:
        self._progress.pop(group, None)

    def serve(self, cell: str, serving: bool, now: float) -> None:
        clock = self._clocks[cell]
        if clock.serving != serving:
            self._wind(clock, now)
            clock.serving = serving
            self._pace(cell, clock)

    def open(self, cell: str, is_open: bool, now: float) -> None:
        self._clocks[cell].open = is_open
        self._share(now)

    def admit(self, now: float) -> list[Running]:
        """Start waiting executions while there is room; returns those that began now."""
        begun: list[Running] = []
        room = self._room()
        while self._waiting and room and (self._cells.overload == "slow" or len(self.running) < room):
            progress = self._rule(self._progress[group] for group in self._waiting)
            queue = self._waiting[progress.group]
            found = queue.popleft()
            if not queue:
                del self._waiting[progress.group]
            found.started = now
            progress.started += 1
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
        self._share(now)
        return ended

    def deadline(self, name: str, attempt: int, now: float) -> Ended | None:
        """Its time on the wall is over: it is cut, if it still runs."""
        found = self.running.get(name)
        if found is None or found.attempt != attempt:
            return None
        self._leave(found, now)
        share = 1.0 - max(0.0, found.left) / found.job.seconds if found.job.seconds else 1.0
        return self._end(found, now, max(0.0, share))

    def clear(self, now: float) -> None:
        """The workers are gone, and with them all that ran or waited."""
        for found in self.running.values():
            self._leave(found, now)
            found.progress.started -= 1
        self.running.clear()
        self._waiting.clear()
        self._share(now)

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
        found.progress.ended += 1
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
        if not clock.serving:
            return 0.0
        if self._cells.overload == "queue":
            return self._speed_of_all
        return self._slowed(clock.members / self._cells.executions_per_cell)

    def _slowed(self, crowd: float) -> float:
        """1 within the room; beyond, only tools run at full speed."""
        generating = self._cells.generation_share
        return 1.0 if crowd <= 1.0 else 1.0 / (generating * crowd + 1.0 - generating)

    def _share(self, now: float) -> None:
        """After the rooms or the running ones have changed: do all still run at full speed?"""
        room = self._room()
        speed = self._slowed(len(self.running) / room) if room else 1.0
        if speed != self._speed_of_all and self._cells.overload == "queue":
            self._speed_of_all = speed
            for cell, clock in self._clocks.items():
                self._wind(clock, now)
                self._pace(cell, clock)
