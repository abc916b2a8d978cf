"""A small world around the very `decide()`: simulated cells, a worker and a processor that write real events.

Discrete events from one seed: every delay, kill and hang is drawn from it, so a failing seed fails again. The
processes obey orders as those of gyre/processes do; what they say is folded with the real fold; a scheduler that was
killed starts from the lines alone.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gyre.ledger import events as ev
from gyre.ledger.fold import LateCut, afresh, fold, fold_all
from gyre.ledger.state import RunState
from gyre.ledger.tail import Line
from gyre.scheduling.decide import decide
from gyre.scheduling.decider import Decider
from gyre.scheduling.facts import World
from gyre.scheduling.settings import Settings

LIVENESS = 6.0
TICK = 2.0
MAX_ORDERS = 400
"""More orders than this without news is a scheduler that argues with itself."""


class Violation(AssertionError):
    """Something that may never happen has happened."""


class Killed(Exception):
    """The process that was speaking is dead."""


@dataclass
class Faults:
    """`kill`: chance at each line that its writer dies, before or after it. `budget`: how many faults in all."""

    kill: float = 0.0
    hang: float = 0.0
    refuse: float = 0.0
    budget: int = 0
    never_back: frozenset[str] = frozenset()
    """Cells that are lost for good when they die."""
    only: tuple[str, ...] = ()
    """Names (or their beginnings) of the processes that may fail; all when empty."""


@dataclass
class Proc:
    """One incarnation of a process."""

    sim: Sim
    name: str
    incarnation: int
    gone: bool = False
    zombie: bool = False
    hung_since: float = -1.0
    hung_until: float = -1.0
    n: int = 0
    inbox: list[Line] = field(default_factory=list)
    accepted: bool = False

    def say(self, event: Any) -> int:
        return self.sim.append(self, event)

    def after(self, delay: float, call: Callable[[], None]) -> None:
        self.when(self.sim.now + delay, call)

    def when(self, t: float, call: Callable[[], None]) -> None:
        """Run `call` at `t`, if this incarnation lives then; a hung one runs it when it comes back."""

        def guarded() -> None:
            if self.gone:
                return
            if self.hung_until > self.sim.now:
                self.sim.schedule(self, self.hung_until, guarded)
                return
            try:
                call()
            except Killed:
                self.sim.kill(self)

        self.sim.schedule(self, t, guarded)

    def start(self) -> None:
        raise NotImplementedError

    def hear(self, line: Line) -> None:
        """A line has become visible to this process."""


class Sim:
    """The clock, the disk and the processes. `run()` returns the state of the ended run."""

    def __init__(
        self,
        settings: Settings,
        seed: int = 0,
        faults: Faults | None = None,
        watch: Callable[[Sim, RunState, ev.Event], None] | None = None,
        calm: Callable[[Sim, World], None] | None = None,
        slots: int = 64,
        speed: float = 1.0,
    ) -> None:
        from .processes import CellProc, ProcessorProc, WorkerProc

        self.settings = settings
        self.rng = random.Random(seed)
        self.faults = faults or Faults()
        self.watch = watch or (lambda sim, state, event: None)
        self.calm = calm or (lambda sim, world: None)
        self.slots = slots
        self.speed = speed
        """Seconds of training a micro-step, about."""
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0
        self.lines: list[Line] = []
        self.procs: dict[str, Proc] = {}
        self.births: dict[str, int] = {}
        self.down_since: dict[str, float] = {}
        self._visible: dict[tuple[str, int, str], float] = {}
        self.manifests: dict[str, Proc] = {}
        self.checkpoints: list[tuple[int, int]] = []
        """(lineage, step) of the complete ones."""
        self.faults_left = self.faults.budget
        self.ended = False
        self.notes: dict[str, int] = {}
        self.kinds: dict[str, type[Proc]] = {
            "scheduler": SchedulerProc,
            "processor": ProcessorProc,
            "worker": WorkerProc,
            "cell": CellProc,
        }

    # ---- clock ----

    def at(self, t: float, call: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (t, self._sequence, call))

    def schedule(self, proc: Proc, t: float, call: Callable[[], None]) -> None:
        """What `proc` will do at `t`."""
        self.at(t, call)

    def draw(self, low: float, high: float) -> float:
        return self.rng.uniform(low, high)

    def note(self, what: str) -> None:
        self.notes[what] = self.notes.get(what, 0) + 1

    # ---- processes ----

    def birth(self, name: str) -> None:
        self.births[name] = self.births.get(name, 0) + 1
        proc = self.kinds[name.partition("-")[0]](self, name, self.births[name])
        old = self.procs.get(name)
        if old is not None and not old.gone:
            old.zombie = True
        self.procs[name] = proc
        self.down_since.pop(name, None)
        # a process reads what lies on the disk when it opens its journal
        proc.inbox = list(self.lines)
        proc.after(0.0, lambda: (proc.say(ev.Opened(pid=1, pid_start=1.0, host="h", code="c")), proc.start()))

    def kill(self, proc: Proc) -> None:
        proc.gone = True
        self.note(f"killed {proc.name.partition('-')[0]}")
        self.manifests = {name: owner for name, owner in self.manifests.items() if owner is not proc}
        if proc.zombie or self.ended:
            return
        self.down_since[proc.name] = self.now
        if proc.name not in self.faults.never_back:
            self.at(self.now + self.draw(0.5, 3 * LIVENESS), lambda: self.birth(proc.name))

    def hang(self, proc: Proc) -> None:
        self.note("hung")
        proc.hung_since, proc.hung_until = self.now, self.now + self.draw(0.5 * LIVENESS, 6 * LIVENESS)
        if self.rng.random() < 0.3:  # its node looks lost: another is started, and both write for a while
            self.note("zombie")
            self.at(self.now + self.draw(LIVENESS, 3 * LIVENESS), lambda: self._replace(proc))

    def _replace(self, proc: Proc) -> None:
        if self.procs.get(proc.name) is proc and not proc.gone and proc.hung_until > self.now:
            self.birth(proc.name)
            self.at(proc.hung_until + self.draw(0.0, 20.0), lambda: self.kill(proc) if not proc.gone else None)

    def dead(self) -> frozenset[str]:
        """By liveness: counters that stand still for long."""
        found = {name for name, since in self.down_since.items() if self.now - since > LIVENESS}
        for name, proc in self.procs.items():
            if not proc.gone and proc.hung_until > self.now and self.now - proc.hung_since > LIVENESS:
                found.add(name)
        return frozenset(found)

    def _may_fail(self, proc: Proc) -> bool:
        return self.faults_left > 0 and (not self.faults.only or proc.name.startswith(self.faults.only))

    # ---- the disk ----

    def append(self, proc: Proc, event: Any) -> int:
        fate = self.rng.random() if self._may_fail(proc) else 1.0
        if fate < self.faults.kill / 2:
            self.faults_left -= 1
            raise Killed
        line = Line(proc.name, proc.incarnation, proc.n, self.now + 1.0, event)
        proc.n += 1
        self.lines.append(line)
        for reader in self.procs.values():
            if not reader.gone:
                self._deliver(line, reader)
        if isinstance(event, ev.RunEnded):
            self.ended = True
        if fate < self.faults.kill:
            self.faults_left -= 1
            raise Killed
        if fate < self.faults.kill + self.faults.hang and proc.name != "scheduler":
            self.faults_left -= 1
            self.hang(proc)
        return line.n

    def _deliver(self, line: Line, reader: Proc) -> None:
        if not reader.wants(line):  # type: ignore[attr-defined]
            return
        key = (line.writer, reader.incarnation, reader.name)
        seen = max(self.now + self.draw(0.01, 0.3), self._visible.get(key, 0.0))
        self._visible[key] = seen
        reader.when(seen, lambda: reader.hear(line))

    # ---- the run ----

    def run(self, max_events: int = 60_000, max_time: float = 20_000.0) -> RunState:
        for name in ("scheduler", "processor", *self.settings.workers, *self.settings.cells):
            self.birth(name)
        done = 0
        while not self.ended:
            if not self._heap or done > max_events or self.now > max_time:
                raise Violation(f"the run does not end: {self.describe()}")
            self.now, _, call = heapq.heappop(self._heap)
            call()
            done += 1
        return fold_all(self.lines)

    def describe(self) -> str:
        state = fold_all(self.lines)
        reign = state.reign()
        cells = {
            name: (found.state, found.training, type(state.roles.get(name)).__name__)
            for name in self.settings.cells
            if (found := state.cell(name)) is not None
        }
        step = reign.step() + 1 if reign is not None else 1
        return (
            f"t={self.now:.0f} lines={len(self.lines)} w={state.waterlevel} step={step} {state.steps.get(step)} "
            f"bursts={len(state.bursts)} cells={cells} dead={sorted(self.dead())} notes={self.notes}"
        )


class SchedulerProc(Proc):
    """gyre/processes/scheduler.py without the files."""

    def wants(self, line: Line) -> bool:
        return line.writer != "scheduler" or line.incarnation != self.incarnation

    def start(self) -> None:
        self.state = fold_all(self.sim.lines)
        self.decider = Decider(self.state, self.sim.settings)
        self.news = False
        self.waiting_since: dict[str, tuple[object, float]] = {}
        seen = self.state.seen.get(self.name, {})
        self.order(
            ev.Accepted(
                writer=self.name,
                incarnation=self.incarnation,
                cut={i: n for i, n in seen.items() if i != self.incarnation},
            )
        )
        self.tick()

    def tick(self) -> None:
        self.think()
        self.after(TICK, self.tick)

    def hear(self, line: Line) -> None:
        self.inbox.append(line)
        if not self.news:
            self.news = True
            self.after(self.sim.draw(0.01, 0.1), self.think)

    def think(self) -> None:
        self.news = False
        inbox, self.inbox = self.inbox, []
        for line in [line for line in inbox if fold(self.state, line)]:
            self.decider.folded(line.writer, line.event)
        dead = self.sim.dead()
        for _ in range(MAX_ORDERS):
            world = World(self.state, self.sim.settings, dead, self._waiting())
            self.decider.look(dead, world.waiting)
            orders = self.decider.decide()
            if orders != decide(world):
                raise Violation(f"the decider says {orders}, and decide {decide(world)}")
            if not orders:
                self.sim.calm(self.sim, world)
                return
            for event in orders:
                self.order(event)
                if self.sim.ended:
                    return
        raise Violation(f"the scheduler argues with itself: {[line.event for line in self.sim.lines[-6:]]}")

    def order(self, event: Any) -> None:
        self.sim.watch(self.sim, self.state, event)
        n = self.say(event)
        fold(self.state, Line(self.name, self.incarnation, n, self.sim.now + 1.0, event))
        self.decider.folded(self.name, event)

    def _waiting(self) -> dict[str, float]:
        for cell in self.sim.settings.cells:
            found = self.state.cell(cell)
            moment = (self.state.roles.get(cell), found and (found.state, found.serving, found.training))
            if cell not in self.waiting_since or self.waiting_since[cell][0] != moment:
                self.waiting_since[cell] = (moment, self.sim.now)
        return {cell: self.sim.now - since for cell, (_, since) in self.waiting_since.items()}


class Folding(Proc):
    """A process with a folded view of its own."""

    def start(self) -> None:
        self.state = RunState()
        self.read: list[Line] = []
        inbox, self.inbox = self.inbox, []
        self.take(inbox)

    def take(self, lines: list[Line]) -> None:
        self.read += lines
        try:
            for line in lines:
                fold(self.state, line)
        except LateCut:
            self.state = fold_all_from(afresh(self.state), self.read)


def fold_all_from(state: RunState, lines: list[Line]) -> RunState:
    while True:
        try:
            for line in lines:
                fold(state, line)
            return state
        except LateCut:
            state = afresh(state)
