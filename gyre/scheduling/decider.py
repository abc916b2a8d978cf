"""The scheduler's mind with a memory: `decide`, for a caller that tells it of each line that was folded.

Owns `Decider`: the decisions of `decide.py`, in their order, with two short cuts. A decision is passed over when
nothing has happened since it last said nothing that could make it speak; and the micro-steps of the step in hand are
indexed. Invariant: the orders are those of `decide()` on the same state (tests/scheduling and tests/simulate hold the
two next to each other over random runs in which processes and cells are lost).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gyre.ledger import events as ev
from gyre.ledger.state import Lineage, RunState
from gyre.scheduling.decide import DECISIONS
from gyre.scheduling.ending import cancel, end
from gyre.scheduling.facts import World
from gyre.scheduling.microsteps import AHEAD
from gyre.scheduling.settings import Settings

Decision = Callable[[World], list[ev.Event]]


class Index:
    """The micro-steps of the step in hand, in the reigning lineage; made anew after whatever is out of the ordinary."""

    def __init__(self, world: World) -> None:
        self.key = (world.number, world.step)
        lineage = world.state.reign()
        self.core = lineage.cell if lineage is not None else ""
        self.grants = list(world.grants)
        self.merged = set(world.merged)
        self.pending = list(world.pending)
        self.lost = world.lost  # what adds to it is followed by an index made anew
        self.unfinished = {cell: {g.grant: g for g in world.unfinished(cell)} for cell in world.settings.cells}
        self.unmerged = {
            cell: list(world.unmerged(lineage, cell)) if lineage is not None else [] for cell in world.settings.cells
        }

    def granted(self, event: ev.Granted) -> None:
        self.grants.append(event)
        self.unfinished[event.cell][event.grant] = event
        if self.pending[: len(event.microsteps)] == event.microsteps:
            del self.pending[: len(event.microsteps)]
        else:
            self.pending = [name for name in self.pending if name not in event.microsteps]

    def took(self, event: ev.Merged) -> None:
        self.merged.update(event.microsteps)
        self.unmerged[event.source] = [name for name in self.unmerged[event.source] if name not in self.merged]

    def done(self, cell: str, event: ev.Done) -> None:
        self.unfinished[cell].pop(event.grant, None)
        if cell == self.core:
            self.merged.update(event.microsteps)
        elif event.grant not in self.lost:
            self.unmerged[cell] += event.microsteps


@dataclass(frozen=True)
class IndexedWorld(World):
    """A World that looks up what a plain one searches for. It outlives facts that only the index follows."""

    index: Index | None = None
    answered: dict[tuple[str, str], bool] = field(default_factory=dict)

    @property
    def _index(self) -> Index:
        if self.index is None:
            raise RuntimeError("an indexed world without its index")
        return self.index

    @property
    def grants(self) -> list[ev.Granted]:  # type: ignore[override]
        return self._index.grants

    @property
    def merged(self) -> set[str]:  # type: ignore[override]
        return self._index.merged

    @property
    def pending(self) -> list[str]:  # type: ignore[override]
        return self._index.pending

    def joined(self, cell: str) -> bool:
        return self._once("joined", World.joined, cell)

    def settled(self, cell: str) -> bool:
        return self._once("settled", World.settled, cell)

    def is_fenced(self, cell: str) -> bool:
        return self._once("fenced", World.is_fenced, cell)

    def _once(self, what: str, question: Callable[[World, str], bool], cell: str) -> bool:
        """An answer about a cell stands until a line of a cell, or to one, makes another world."""
        found = self.answered.get((what, cell))
        if found is None:
            found = self.answered[what, cell] = question(self, cell)
        return found

    def unfinished(self, cell: str) -> list[ev.Granted]:
        return list(self._index.unfinished[cell].values())

    def load(self, cell: str) -> int:
        return len(self._index.unfinished[cell])

    def unmerged(self, lineage: Lineage, cell: str) -> list[str]:
        return self._index.unmerged[cell] if cell != lineage.cell else []


class Decider:
    """`decide`, for a caller that tells it of each line that was folded.

    `decisions`: those of the daemon, or another policy's; one in place of the daemon's bears the same name.
    """

    def __init__(self, state: RunState, settings: Settings, decisions: tuple[Decision, ...] = DECISIONS) -> None:
        self._state, self._settings = state, settings
        self._decisions = decisions
        self._awake = [True] * len(decisions)
        self._places = {decision.__name__: place for place, decision in enumerate(decisions)}
        self._index: Index | None = None
        self._world: World | None = None
        self._level = -1
        self.dead: frozenset[str] = frozenset()
        self.waiting: Mapping[str, float] = {}
        self.pausing: frozenset[str] = frozenset()

    def look(self, dead: frozenset[str], waiting: Mapping[str, float], pausing: frozenset[str] = frozenset()) -> None:
        """Time has passed: what the scheduler's own clock says now. Only `restart` asks how long cells have waited."""
        self.waiting, self._world = waiting, None
        self._wake("restart")
        if pausing != self.pausing:
            self.pausing = pausing
            self._wake("dispatch")
        if dead != self.dead:
            self.dead, self._index = dead, None
            self._wake_all()

    def decide(self) -> list[ev.Event]:
        if self._state.ended is not None:
            return []
        world = self.world()
        if self._state.cancel:
            return cancel(world)
        ending = end(world)
        if ending:
            return ending
        for place, decision in enumerate(self._decisions):
            if self._awake[place]:
                orders = decision(world)
                if orders:
                    return orders
                self._awake[place] = False
        return []

    def world(self) -> World:
        if self._world is None:
            self._world = self._make_world()
        return self._world

    def _make_world(self) -> World:
        plain = World(self._state, self._settings, self.dead, self.waiting, self.pausing)
        if self._index is None or self._index.key != (plain.number, plain.step):
            self._index = Index(plain)
        return IndexedWorld(self._state, self._settings, self.dead, self.waiting, self.pausing, self._index)

    # ---- what was folded ----

    def folded(self, writer: str, event: ev.Event) -> None:
        """Keep the index, and wake the decisions that this line can make speak: all but for the frequent ones."""
        if isinstance(event, ev.Started):
            pass
        elif isinstance(event, ev.Finished):
            self._finished(event)
        elif self._of_step(event):
            self._indexed(writer, event)
        else:
            if isinstance(event, _UPSETTING):
                self._index = None
            self._hear(event)

    def _hear(self, event: ev.Event) -> None:
        """Wake all decisions, but those of which the table says that they do not depend on such a line."""
        self._world = None
        self._level = -1  # a burst that opens raises the waterlevel: the next end is not compared with one before it
        alive = not isinstance(event, ev.CellEntered) or event.state in ("ready", "starting", "failed")
        for name, place in self._places.items():
            if name not in _HEARS or (alive and isinstance(event, _HEARS[name])):
                self._awake[place] = True

    def _finished(self, event: ev.Finished) -> None:
        state, room = self._state, self._settings.cell_room
        # what serving cells carry is a multiple of a cell's room
        level = -(-state.waterlevel // room)
        if state.group_terminal(event.execution.rpartition("-")[0]):
            self._wake("consume", "switch")
        elif level != self._level:
            self._wake("switch")
        self._level = level
        if state.live.waiting or self._worker_lost():
            self._wake("dispatch")

    def _worker_lost(self) -> bool:
        """Do executions wait that another worker takes them over?"""
        return any(
            worker in self.dead or incarnation != self._state.incarnation(worker)
            for worker, incarnations in self._state.live.running.items()
            for incarnation in incarnations
        )

    def _of_step(self, event: ev.Event) -> bool:
        """Is it about micro-steps of the step in hand? Anything else that is has the index made anew."""
        if self._index is None:
            return False
        if isinstance(event, ev.MicroStepReady):
            return event.step == self._index.key[1]
        return isinstance(event, _OF_STEP) and (event.lineage, event.step) == self._index.key

    def _indexed(self, writer: str, event: ev.Event) -> None:
        index = self._index
        if index is None:
            return
        if isinstance(event, ev.MicroStepReady):
            index.pending.append(event.microstep)
            self._wake("grant")
        elif isinstance(event, ev.Granted):
            index.granted(event)
            if not index.pending:
                self._wake("offer", "flush", "switch")
            elif self._hungry(index):
                self._wake("grant")
        elif isinstance(event, ev.Done):
            index.done(writer, event)
            if index.pending:
                self._wake("grant")
            if not index.unfinished[writer]:
                self._wake("commit", "offer", "flush", "switch")
        elif isinstance(event, ev.Merged):
            index.took(event)
            self._hear(event)

    def _hungry(self, index: Index) -> bool:
        """Is there a training cell with fewer grants than it may have?"""
        world = self.world()
        return any(len(grants) < AHEAD and world.training(cell) for cell, grants in index.unfinished.items())

    def _wake_all(self) -> None:
        self._world = None
        self._awake = [True] * len(self._decisions)

    def _wake(self, *names: str) -> None:
        for name in names:
            place = self._places.get(name)
            if place is None:
                self._wake_all()
                return
            self._awake[place] = True


_OF_STEP = (ev.Granted, ev.Done, ev.Merged)

_UPSETTING = (
    ev.MicroStepReady,
    ev.Granted,
    ev.Done,
    ev.Merged,
    ev.Refused,
    ev.Fenced,
    ev.Offered,
    ev.Accepted,
    ev.LineageOpened,
    ev.Committed,
)
"""What changes the micro-steps of a step in a way that `Index` does not follow."""

_HEARS: dict[str, tuple[type, ...]] = {
    "fence": (ev.Accepted, ev.CellEntered, ev.LineageOpened, ev.Fenced),
    "dispatch": (ev.BurstOpened, ev.Dispatched, ev.WorkerReady, ev.Accepted, ev.Excluded),
    "route": (
        ev.BurstOpened,
        ev.Accepted,
        ev.CellEntered,
        ev.TrainOrdered,
        ev.ServeOrdered,
        ev.LineageOpened,
        ev.Committed,
        ev.Excluded,
    ),
}
"""The lines that a costly decision depends on; the others hear every line."""
