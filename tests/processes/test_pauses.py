"""Pauses after failures, by a clock that the test hands in."""

from __future__ import annotations

from gyre.ledger import events as ev
from gyre.processes.pauses import Pauses
from gyre.scheduling.decider import Decider
from tests.scheduling.settings import make
from tests.scheduling.test_decisions import Told

FIRST, SECOND = "g00000-00", "g00000-01"


class Scene:
    """One worker with a single slot, and two executions that want it."""

    def __init__(self) -> None:
        self.moment = 100.0
        self.settings = make(1, attempts=5, executions=2, groups_per_step=1)
        self.told = Told().accept("worker-0").tell("worker-0", ev.WorkerReady(slots=1))
        plan = ev.GroupPlan("g00000", "a", 2)
        self.told.tell("scheduler", ev.BurstOpened(burst=1, lineage=1, version=0, groups=[plan]))
        self.pauses = Pauses(lambda: self.moment)
        self.decider = Decider(self.told.state, self.settings)

    def dispatched(self) -> list[tuple[str, int]]:
        self.decider.look(frozenset(), {}, self.pauses.now(self.told.state))
        orders = [order for order in self.decider.decide() if isinstance(order, ev.Dispatched)]
        for order in orders:
            self.told.tell("scheduler", order)
            self.decider.folded("scheduler", order)
        return [(each.execution, each.attempt) for order in orders for each in order.executions]

    def fails(self, execution: str, attempt: int, interrupted: bool = False) -> None:
        self._ends(
            ev.Finished(execution=execution, attempt=attempt, outcome="retry", reason="x", interrupted=interrupted)
        )

    def succeeds(self, execution: str, attempt: int) -> None:
        self._ends(ev.Finished(execution=execution, attempt=attempt, outcome="graded", reason="x", reward=1.0))

    def _ends(self, end: ev.Finished) -> None:
        self.told.tell("worker-0", end)
        self.decider.folded("worker-0", end)


def test_a_pause_holds_no_slot() -> None:
    scene = Scene()
    assert scene.dispatched() == [(FIRST, 1)]
    scene.fails(FIRST, 1)
    assert scene.dispatched() == [(SECOND, 1)], "the slot is the other's while the first one pauses"
    scene.succeeds(SECOND, 1)
    scene.moment += 0.49
    assert scene.dispatched() == [], "free, and not due"
    scene.moment += 0.02
    assert scene.dispatched() == [(FIRST, 2)], "nothing but the time has changed"


def test_pauses_double_and_interruptions_wait_for_nothing() -> None:
    scene = Scene()
    scene.dispatched()
    scene.fails(FIRST, 1, interrupted=True)
    assert scene.dispatched() == [(FIRST, 2)]
    for attempt, pause in ((2, 0.5), (3, 1.0), (4, 2.0)):
        scene.fails(FIRST, attempt)
        if attempt == 2:
            assert scene.dispatched() == [(SECOND, 1)]
            scene.succeeds(SECOND, 1)
        assert scene.dispatched() == []
        scene.moment += pause - 0.01
        assert scene.dispatched() == []
        scene.moment += 0.02
        assert scene.dispatched() == [(FIRST, attempt + 1)]
