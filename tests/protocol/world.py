"""The small world of tests/scheduling without a clock: what can happen next may happen in any order.

Owns the choice of the next action, and the faults between actions and between journal lines. The decisions and the
fold are the very ones of gyre; the processes are those of tests/scheduling, with cells whose ranks are modelled
(tests/protocol/cells.py). Invariant: lines of one writer reach each reader in their order; nothing else is ordered.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

from gyre.ledger.fold import LateCut, afresh, fold, fold_all
from gyre.ledger.state import RunState
from gyre.ledger.tail import Line
from gyre.scheduling.settings import Settings
from tests.scheduling.laws import Laws
from tests.scheduling.world import TICK, Faults, Killed, Proc, Sim, Violation, fold_all_from

Action = Callable[[], None]
Weights = tuple[int, int]
"""(lineage, step) of the commit that made them; (0, 0): the model folder."""

QUIET = 60
"""Actions without a line after which time passes: the scheduler thinks of itself."""
IDLE = 4
"""So many times time passes without a line: every deadline is over, nothing but a fault or its end brings news."""
STUCK = 30
"""So many times time passes without a line: deadlock."""
LONGEST = 40_000


class Free(Sim):
    """Processes whose actions anybody picks: hypothesis, or `random` from a seed. `refuse`: chance that the core
    cannot pull a contribution."""

    def __init__(self, settings: Settings, seed: int, ranks: int, refuse: float = 0.0) -> None:
        from tests.protocol.cells import RankedCell

        self.laws = Laws(settings)
        super().__init__(settings, seed, Faults(refuse=refuse), watch=self.laws.order, calm=self.laws.calm)
        self.kinds = {**self.kinds, "cell": RankedCell}
        self.ranks = ranks
        self._pool: list[tuple[Proc, Action]] = []
        self._ticks: list[tuple[Proc, Action]] = []
        self._queues: dict[tuple[int, str], deque[Line]] = {}
        self._readers: dict[int, Proc] = {}
        self._begun: set[int] = set()
        self.stalled: set[str] = set()
        self.noticed: set[str] = set()
        self.armed: dict[str, tuple[int, bool]] = {}
        """process -> (its line at which it dies, counted from 1; after that line rather than before it)"""
        self.published: dict[str, Weights] = {}
        """manifest -> weights"""
        self.saved: dict[int, tuple[int, Weights]] = {}
        """step -> (lineage, weights) of its checkpoint: one folder a step"""
        self.contributions: dict[str, list[list[tuple[str, Weights]]]] = {}
        """manifest -> each rank's frozen gradients"""
        self.parents: dict[Weights, Weights] = {}
        """What each commit stepped from."""
        self._lines_then = self._quiet = self._stuck = 0
        self._state, self._folded = RunState(), 0
        for name in ("scheduler", "processor", *settings.workers, *settings.cells):
            self.birth(name)

    def known(self) -> RunState:
        """All lines so far, folded."""
        try:
            for line in self.lines[self._folded :]:
                fold(self._state, line)
        except LateCut:
            self._state = fold_all_from(afresh(self._state), self.lines)
        self._folded = len(self.lines)
        return self._state

    def ordered(self, cell: str) -> str:
        """The manifest that the newest role order to the newest incarnation of `cell` names."""
        order = self.known().roles.get(cell)
        return order.manifest if order is not None and order.incarnation == self.procs[cell].incarnation else ""

    # ---- what can happen ----

    def at(self, t: float, call: Action) -> None:
        raise NotImplementedError("nothing has a time here")

    def schedule(self, proc: Proc, t: float, call: Action) -> None:
        slow = proc.name == "scheduler" and t - self.now >= TICK
        (self._ticks if slow else self._pool).append((proc, call))

    def _deliver(self, line: Line, reader: Proc) -> None:
        if reader.wants(line):  # type: ignore[attr-defined]
            self._readers[id(reader)] = reader
            self._queues.setdefault((id(reader), line.writer), deque()).append(line)

    def _can(self, proc: Proc) -> bool:
        return not proc.gone and not (proc.name in self.stalled and self.procs[proc.name] is proc)

    def enabled(self) -> list[Action]:
        """Every action that may be the next. A process begins before it hears."""
        self._pool = [entry for entry in self._pool if not entry[0].gone]
        self._ticks = [entry for entry in self._ticks if not entry[0].gone]
        found: list[Action] = [
            lambda entry=entry: self._act(entry)  # type: ignore[misc]
            for entry in self._pool
            if self._can(entry[0])
        ]
        for key in [key for key, queue in self._queues.items() if not queue or self._readers[key[0]].gone]:
            del self._queues[key]
        for key in self._queues:
            reader = self._readers[key[0]]
            if id(reader) in self._begun and self._can(reader):
                found.append(lambda key=key, reader=reader: self._hear(key, reader))  # type: ignore[misc]
        return found

    def _act(self, entry: tuple[Proc, Action]) -> None:
        self._pool.remove(entry)
        self._begun.add(id(entry[0]))
        self._readers[id(entry[0])] = entry[0]
        entry[1]()

    def _hear(self, key: tuple[int, str], reader: Proc) -> None:
        line = self._queues[key].popleft()
        try:
            reader.hear(line)
        except Killed:
            self.kill(reader)

    def look(self, reader: Proc) -> None:
        """It polls the ledger now: all that was written is heard."""
        for key, queue in self._queues.items():
            while key[0] == id(reader) and queue:
                self._hear(key, reader)

    def step(self, choice: int) -> None:
        """One action; when nothing was written for long, time passes."""
        if self.ended:
            return
        actions = self.enabled()
        if actions:
            actions[choice % len(actions)]()
        self._quiet = 0 if len(self.lines) > self._lines_then else self._quiet + 1
        self._stuck = 0 if len(self.lines) > self._lines_then else self._stuck
        self._lines_then = len(self.lines)
        if not actions or self._quiet >= QUIET:
            self.pass_time()

    def pass_time(self) -> None:
        """The scheduler thinks; from the second time in a row on, every deadline has passed."""
        self._quiet = 0
        self._stuck += 1
        if self._stuck > 1:
            self.now += 10 * self.settings.phase_timeout
        for entry in list(self._ticks):
            self._ticks.remove(entry)
            entry[1]()

    # ---- faults ----

    def append(self, proc: Proc, event: Any) -> int:
        lines, after = self.armed.get(proc.name, (0, False))
        if lines == 1:
            del self.armed[proc.name]
            if not after:
                raise Killed
        elif lines:
            self.armed[proc.name] = (lines - 1, after)
        n = super().append(proc, event)
        if lines == 1:
            raise Killed
        return n

    def kill(self, proc: Proc) -> None:
        proc.gone = True
        self.note(f"killed {proc.name.partition('-')[0]}")
        self.manifests = {name: owner for name, owner in self.manifests.items() if owner is not proc}
        if self.procs[proc.name] is proc:
            self.stalled.discard(proc.name)

    def down(self) -> list[str]:
        return [name for name, proc in self.procs.items() if proc.gone]

    def restart(self, name: str) -> None:
        """A new incarnation; one that only stands still becomes a zombie, and may go on."""
        self.stalled.discard(name)
        self.noticed.discard(name)
        self.armed.pop(name, None)
        self.birth(name)

    def stall(self, name: str) -> None:
        if name != "scheduler" and not self.procs[name].gone:
            self.stalled.add(name)

    def wake(self, name: str) -> None:
        self.stalled.discard(name)
        if not self.procs[name].gone:
            self.noticed.discard(name)

    def notice(self) -> None:
        """Counters that stand still are seen to."""
        self.noticed |= {*self.down(), *self.stalled}

    @property
    def waits_for_nothing(self) -> bool:
        return self._stuck >= IDLE

    def dead(self) -> frozenset[str]:
        return frozenset(self.noticed)

    # ---- to the end ----

    def settle(self, seed: int) -> RunState:
        """No more faults: everything comes back, and the run has to end. What must hold of the whole history."""
        rng = random.Random(seed)
        self.armed.clear()
        self.faults.refuse = 0.0
        self._quiet = self._stuck = 0
        for name in list(self.stalled):
            self.wake(name)
        for _ in range(LONGEST):
            if self.ended:
                break
            for name in self.down():
                if rng.random() < 0.1:
                    self.restart(name)
            self.step(rng.randrange(1 << 30))
            if self._stuck > STUCK and not self.down():
                raise Violation(f"deadlock: {self.describe()}")
        else:
            raise Violation(f"the run does not end: {self.describe()}")
        return self.check()

    def check(self) -> RunState:
        """Laws of an ended run: every step stands once, made from exactly its packed micro-steps, in one chain."""
        from gyre.views.audit import merged_microsteps

        state = fold_all(self.lines)
        self.laws.whole(state)
        history = state.history()
        opened = {found.opened.step for found in state.lineages.values()}
        for step in range(1, self.settings.steps + 1):
            # a core that dies between its checkpoint and the line says nothing; the next lineage opens from there
            assert step in history or step in opened
        for step, (lineage, _) in history.items():
            packed = state.steps[step].packed
            assert packed is not None
            assert sorted(merged_microsteps(state, lineage, step)) == sorted(packed.microsteps)
        last = self.settings.steps
        weights = (history[last][0], last) if last in history else self.saved[last][1]
        for step in range(last, 0, -1):
            assert weights[1] == step
            assert step not in history or history[step][0] == weights[0], "the weights are not of the steps that stand"
            weights = self.parents[weights]
        assert weights == (0, 0)
        return state
