"""A simulated cell's lead: it obeys the orders that a real one obeys, and time passes instead of work.

Owns what a cell says of itself. Invariant: as in processes/cell.py, orders are done one at a time and in their order;
each change of state is said when it is true; a frozen buffer takes no grants until the core has answered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from gyre.ledger import events as ev
from gyre.simulate.workload import Cells, Training

Steps = Generator[float, None, None]
"""What a cell does for one order: it yields the seconds that pass."""


@dataclass
class Surroundings:
    """What a cell needs of the simulation: to speak, to sleep, and the time."""

    say: Callable[[str, int, ev.Event], int]
    later: Callable[[float, Callable[[], None]], None]
    now: Callable[[], float]
    serve: Callable[[str, bool], None]
    open: Callable[[str, bool], None]
    """Executions may begin: the cell serves, or is about to."""
    seconds_of: Callable[[str], float]
    """Training of a micro-step."""
    newest: Callable[[], tuple[int, int, str]]
    """(step, version, weight_version) of the newest checkpoint: what a new lineage opens from."""


@dataclass
class SimulatedCell:
    """`busy`: (began, ended) of training, adjacent ones joined: for the picture."""

    name: str
    cells: Cells
    training: Training
    around: Surroundings
    incarnation: int = 1
    state: ev.CellState = "starting"
    since: float = 0.0
    lineage: int = 0
    offers: int = 0
    frozen: bool = False
    buffer: list[str] = field(default_factory=list)
    fenced: set[tuple[str, int]] = field(default_factory=set)
    orders: deque[ev.Event] = field(default_factory=deque)
    deferred: list[ev.Event] = field(default_factory=list)
    busy: list[list[float]] = field(default_factory=list)
    states: list[tuple[str, float, float]] = field(default_factory=list)
    trained: float = 0.0
    optimizing: float = 0.0
    _doing: Steps | None = None

    # ---- life ----

    def start(self) -> None:
        self.say(ev.Opened(pid=1, pid_start=0.0, host="simulated", code=""))
        self.enter("ready")

    def fail(self) -> None:
        """This incarnation is gone, with what it held."""
        self.incarnation += 1
        self._doing = None
        self.orders.clear()
        self.buffer, self.fenced, self.deferred = [], set(), []
        self.lineage, self.offers, self.frozen = 0, 0, False
        self._state("starting")
        self.around.open(self.name, False)
        self.around.serve(self.name, False)

    def say(self, event: ev.Event) -> None:
        self.around.say(self.name, self.incarnation, event)

    def enter(self, state: ev.CellState, lineage: int = 0, step: int = 0) -> None:
        seconds = self.around.now() - self.since
        self._state(state)
        self.say(ev.CellEntered(state=state, seconds=seconds, lineage=lineage, step=step))

    def _state(self, state: ev.CellState) -> None:
        now = self.around.now()
        if now > self.since:
            self.states.append((self.state, self.since, now))
        self.state, self.since = state, now

    # ---- orders ----

    def obey(self, order: ev.Event) -> None:
        self.orders.append(order)
        if self._doing is None:
            self._next()

    def _next(self) -> None:
        """Go on with the order in hand, and with the ones after it, until time has to pass."""
        while True:
            if self._doing is None:
                if not self.orders:
                    return
                self._doing = self._do(self.orders.popleft())
            doing = self._doing
            for seconds in doing:
                if seconds > 0.0:
                    self.around.later(seconds, lambda: self._wake(doing))  # noqa: B023 (it returns)
                    return
            self._doing = None

    def _wake(self, doing: Steps) -> None:
        """Time has passed; if the cell still does what it did then, it goes on."""
        if self._doing is doing:
            self._next()

    def _do(self, order: ev.Event) -> Steps:
        match order:
            case ev.LineageOrdered():
                self.lineage = order.lineage
                step, version, weights = self.around.newest()
                self.say(
                    ev.LineageOpened(
                        lineage=order.lineage, step=step, version=version, weight_version=weights, manifest=weights
                    )
                )
            case ev.TrainOrdered():
                yield from self._train_role(order)
            case ev.ServeOrdered():
                yield from self._serve_role(order)
            case ev.Granted():
                yield from self._train(order)
            case ev.OfferOrdered():
                self._offer(order)
            case ev.Merged() | ev.Refused():
                self._answered(order.number)
            case ev.MergeOrdered():
                yield from self._merge(order)
            case ev.FenceOrdered():
                self.fenced.add((order.source, order.source_incarnation))
                self.say(
                    ev.Fenced(lineage=order.lineage, source=order.source, source_incarnation=order.source_incarnation)
                )
            case ev.CommitOrdered():
                yield from self._commit(order)
            case _:
                raise TypeError(f"{self.name} knows no order {order}")

    def _train_role(self, order: ev.TrainOrdered) -> Steps:
        if self.state != "training":
            phases = 3.0 if self.lineage != order.lineage else 2.0
            self.around.open(self.name, False)
            self.enter("draining")
            self.say(ev.ServingEnded())
            self.around.serve(self.name, False)
            yield self.cells.to_training / phases
            self.enter("releasing")
            yield self.cells.to_training / phases
            if phases > 2.0:
                self.enter("joining")
                yield self.cells.to_training / phases
        elif self.lineage != order.lineage:
            self.enter("joining")
            yield self.cells.rejoin
        self._thaw()
        self.enter("training", order.lineage, order.step)

    def _serve_role(self, order: ev.ServeOrdered) -> Steps:
        self.around.open(self.name, True)
        seconds = self.cells.refresh
        if self.state == "training":
            self.enter("leaving")
            seconds = self.cells.to_rollout
        self.enter("resuming")
        self.say(ev.ServingEnded())
        self.around.serve(self.name, False)
        self._thaw()
        yield seconds
        self.say(ev.Serving(lineage=order.lineage, version=order.version, weight_version=order.weight_version))
        self.enter("rollout")
        self.around.serve(self.name, True)

    # ---- gradients ----

    def _thaw(self) -> None:
        self.frozen, self.deferred, self.buffer = False, [], []

    def _train(self, order: ev.Granted) -> Steps:
        if self.frozen:
            self.deferred.append(order)
            return
        seconds = sum(self.around.seconds_of(name) for name in order.microsteps)
        began = self.around.now()
        yield seconds
        self.trained += seconds
        self._was_busy(began)
        self.buffer += order.microsteps
        self.say(
            ev.Done(
                grant=order.grant, lineage=order.lineage, step=order.step, microsteps=order.microsteps, seconds=seconds
            )
        )

    def _was_busy(self, began: float) -> None:
        now = self.around.now()
        if self.busy and began - self.busy[-1][1] < 1e-6:
            self.busy[-1][1] = now
        else:
            self.busy.append([began, now])

    def _offer(self, order: ev.OfferOrdered) -> None:
        self.offers += 1
        self.frozen = True
        self.say(
            ev.Offered(
                lineage=order.lineage,
                step=order.step,
                number=self.offers,
                microsteps=self.buffer,
                manifest=f"{self.name}/{self.offers}",
            )
        )

    def _answered(self, number: int) -> None:
        if not self.frozen or number != self.offers:
            return
        self.frozen, self.buffer = False, []
        self.orders.extendleft(reversed(self.deferred))
        self.deferred = []

    def _merge(self, order: ev.MergeOrdered) -> Steps:
        source = (order.source, order.source_incarnation)
        reason = "the lineage is over" if order.lineage != self.lineage else "fenced" if source in self.fenced else ""
        if not reason:
            yield self.training.merge
            self.say(
                ev.Merged(
                    lineage=order.lineage,
                    step=order.step,
                    source=order.source,
                    source_incarnation=order.source_incarnation,
                    number=order.number,
                    microsteps=order.microsteps,
                )
            )
        else:
            self.say(
                ev.Refused(
                    lineage=order.lineage,
                    step=order.step,
                    source=order.source,
                    source_incarnation=order.source_incarnation,
                    number=order.number,
                    reason=reason,
                )
            )

    def _commit(self, order: ev.CommitOrdered) -> Steps:
        began = self.around.now()
        yield self.training.optimizer
        self._was_busy(began)
        self.optimizing += self.around.now() - began
        self.buffer = []
        weights = f"{order.lineage}.{order.version}-{order.step:016x}"
        self.say(
            ev.Committed(
                lineage=order.lineage,
                step=order.step,
                version=order.version,
                weight_version=weights,
                manifest=weights,
                checkpointed=order.checkpoint,
                seconds=self.around.now() - began,
            )
        )
