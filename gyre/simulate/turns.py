"""Executions as turns: each generates on its cell's engine, then runs a tool, until its time is used up.

Owns the progress of turns. Calls that generate at the same time on one cell share its engine: each runs at the speed
that the workload's curve gives for so many. A tool's time passes wherever the execution is. Invariants: an execution
ends once, when it has had exactly its seconds (at full speed) of generation and tools together, or at its deadline; the
turns of an execution follow from the seed and its name. This is `Rollout` with another idea of service.
"""

from __future__ import annotations

import heapq
import math
import random
import zlib
from dataclasses import dataclass, field

from gyre.simulate.jobs import Job
from gyre.simulate.policies import Progress, StartRule
from gyre.simulate.rollout import Clock, Ended, Rollout, Running
from gyre.simulate.workload import Cells, Turns

DRAWS = 1 << 14
"""Lengths that are drawn once and then walked through, each execution from a place of its own."""
NEVER = math.inf


@dataclass(slots=True)
class Turning(Running):
    """`left`: seconds that no turn has been given yet; `rest`: of the phase in hand, while the execution moves."""

    draw: int = 0
    tool: bool = False
    rest: float = 0.0
    extra: float = 0.0
    """Engine time that the next generation takes besides: its context is read anew."""


@dataclass(slots=True)
class TurnClock(Clock):
    """`queue`: calls that generate, by what the clock shows when they end. `tools`: (end, order, execution)."""

    tools: list[tuple[float, int, Turning]] = field(default_factory=list)
    next: float = NEVER


class TurnRollout(Rollout):
    """All cells' turns. The caller asks for them with `run`; there are no alarms."""

    def __init__(self, cells: Cells, turns: Turns, names: tuple[str, ...], rule: StartRule, seed: int) -> None:
        super().__init__(cells, names, rule, lambda at, cell, stamp: None)
        self._clocks = {name: TurnClock() for name in ("", *names)}  # "": without a cell, tools go on
        self._generation = turns.generation * turns.seconds
        self._tool = turns.seconds - self._generation
        dice = random.Random(f"{seed}/turns")
        lengths = [math.exp(turns.spread * dice.gauss(0.0, 1.0)) for _ in range(DRAWS)]
        mean = sum(lengths) / DRAWS
        self._lengths = [length / mean for length in lengths]
        self._curve = turns.curve or [(float(cells.executions_per_cell), 1.0)]
        self._speeds = [1.0]
        """Speed of each call, by how many there are."""
        self._heap: list[tuple[float, int, TurnClock]] = []
        self.calls = 0
        self.events = 0
        """Ends of generations and of tools."""

    def run(self, until: float) -> tuple[float, list[Ended]]:
        """Turns up to `until`, or up to the first execution that ends; (time, who ended)."""
        heap, lengths, mask = self._heap, self._lengths, DRAWS - 1
        generation, tool = self._generation, self._tool
        push, pop, replace = heapq.heappush, heapq.heappop, heapq.heapreplace
        events, calls, order, ended = 0, 0, self._order, None
        while heap and ended is None:
            at, _, clock = heap[0]
            if at != clock.next:
                pop(heap)
                continue
            if at > until:
                break
            queue, tools = clock.queue, clock.tools
            clock.shows += (at - clock.at) * clock.speed
            clock.at = at
            events += 1
            order += 1
            if tools and tools[0][0] <= at:
                found = pop(tools)[2]
                if found.left <= 0.0:
                    ended = found
                else:
                    found.tool = False
                    seconds = generation * lengths[found.draw & mask]
                    found.draw += 1
                    if seconds > found.left:
                        seconds = found.left
                    found.left -= seconds
                    found.ends = clock.shows + seconds + found.extra
                    found.extra = 0.0
                    push(queue, (found.ends, order, found))
            else:
                found = pop(queue)[2]  # type: ignore[assignment]
                calls += 1
                if found.left <= 0.0:
                    ended = found
                else:
                    found.tool = True
                    seconds = tool * lengths[found.draw & mask]
                    found.draw += 1
                    if seconds > found.left:
                        seconds = found.left
                    found.left -= seconds
                    push(tools, (at + seconds, order, found))
            self._set_next(clock)
            replace(heap, (clock.next, order, clock))
        self._order = order
        self.events += events
        self.calls += calls
        if ended is None:
            return until, []
        return at, [self._end(ended, at, 1.0)]

    # ---- service, as turns ----

    def _make(self, name: str, attempt: int, job: Job, progress: Progress) -> Running:
        start = zlib.crc32(f"{name}/{attempt}".encode())
        return Turning(name, attempt, job, progress, left=job.seconds, draw=start, tool=True)

    def _join(self, found: Running, cell: str, now: float) -> None:
        assert isinstance(found, Turning)
        clock = self._clock(cell)
        self._wind(clock, now)
        found.cell = cell
        clock.members += 1
        self._order += 1
        found.left -= found.rest
        if found.tool:  # a new execution is at the end of a tool that took no time
            heapq.heappush(clock.tools, (now + found.rest, self._order, found))
        else:
            found.ends = clock.shows + found.rest + found.extra
            found.extra = 0.0
            heapq.heappush(clock.queue, (found.ends, self._order, found))
        self._pace(cell, clock)

    def _leave(self, found: Running, now: float) -> None:
        assert isinstance(found, Turning)
        clock = self._clock(found.cell)
        self._wind(clock, now)
        if found.tool:
            place = next(i for i, entry in enumerate(clock.tools) if entry[2] is found)
            found.rest = max(0.0, clock.tools.pop(place)[0] - now)
            heapq.heapify(clock.tools)
        else:
            place = next(i for i, entry in enumerate(clock.queue) if entry[2] is found)
            found.rest = max(0.0, clock.queue.pop(place)[0] - clock.shows)
            heapq.heapify(clock.queue)
        found.left += found.rest
        clock.members -= 1
        self._pace(found.cell, clock)
        found.cell = ""

    def _reroute(self, found: Running, seconds: float) -> None:
        assert isinstance(found, Turning)
        found.extra += seconds

    def _clock(self, cell: str) -> TurnClock:
        clock = self._clocks.get(cell, self._clocks[""])
        assert isinstance(clock, TurnClock)
        return clock

    def _pace(self, cell: str, clock: Clock) -> None:
        assert isinstance(clock, TurnClock)
        self._set_next(clock)
        if clock.next < NEVER:
            self._order += 1
            heapq.heappush(self._heap, (clock.next, self._order, clock))

    def _set_next(self, clock: TurnClock) -> None:
        """After any change: the clock's speed, and when its next phase ends."""
        queue, tools = clock.queue, clock.tools
        due = tools[0][0] if tools else NEVER
        clock.speed = 0.0
        if clock.serving and queue:
            count = len(queue)
            while count >= len(self._speeds):
                self._speeds.append(speed_at(self._curve, len(self._speeds)))
            clock.speed = self._speeds[count]
            left = queue[0][0] - clock.shows
            end = clock.at + left / clock.speed if left > 0.0 else clock.at
            if end < due:
                due = end
        clock.next = due

    def _share(self, now: float) -> None:
        """The curve says how fast a crowd is served."""


def speed_at(curve: list[tuple[float, float]], calls: float) -> float:
    """Speed of each of `calls` calls: (calls, speed) of the curve, straight in between, their product kept beyond."""
    before = (0.0, curve[0][1])
    for point in curve:
        if calls <= point[0]:
            share = (calls - before[0]) / (point[0] - before[0])
            return before[1] + share * (point[1] - before[1])
        before = point
    return before[0] * before[1] / calls
