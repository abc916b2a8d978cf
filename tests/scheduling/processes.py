"""The processes of the small world: what gyre/processes does, without engines, ranks and files."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from typing import Any

from gyre.ledger import events as ev
from gyre.ledger.fold import fold_all
from gyre.ledger.tail import Line

from .world import Folding, Proc, Violation

Pause = Iterator[float | None]
"""What a cell's work yields: seconds to wait, or None for news."""

FULL = 4
"""Samples of a micro-step."""


class WorkerProc(Proc):
    """Runs executions: each is a few calls, and a call needs a route to a cell that serves."""

    def wants(self, line: Line) -> bool:
        if line.writer == "scheduler":
            return isinstance(line.event, ev.Accepted | ev.Dispatched | ev.Routed)
        return isinstance(line.event, ev.Serving)

    def start(self) -> None:
        self.routes: dict[str, str] = {}
        self.waiting: list[tuple[ev.Dispatch, int]] = []
        self.newest = (0, -1)
        for line in self.inbox:
            if isinstance(line.event, ev.Routed):
                self._route(line)

    def _route(self, line: Line) -> None:
        self.routes.update(line.event.routes)
        self.newest = (line.incarnation, line.n)

    def hear(self, line: Line) -> None:
        event = line.event
        if isinstance(event, ev.Accepted):
            if not self.accepted and (event.writer, event.incarnation) == (self.name, self.incarnation):
                self.accepted = True
                self.say(ev.WorkerReady(slots=self.sim.slots))
                self.say(ev.RoutesAcknowledged(epoch=self.newest[0], n=self.newest[1]))
        elif isinstance(event, ev.Routed):
            self._route(line)
            if self.accepted:
                self.say(ev.RoutesAcknowledged(epoch=line.incarnation, n=line.n))
            self._wake()
        elif isinstance(event, ev.Serving):
            self._wake()
        elif (event.worker, event.incarnation) == (self.name, self.incarnation):
            for dispatch in event.executions:
                self.after(self.sim.draw(0.0, 0.5), lambda d=dispatch: self._begin(d))

    def _begin(self, dispatch: ev.Dispatch) -> None:
        self.say(ev.Started(execution=dispatch.execution, attempt=dispatch.attempt))
        self._go_on(dispatch, self.sim.rng.randint(1, 3))

    def _wake(self) -> None:
        waiting, self.waiting = self.waiting, []
        for dispatch, calls in waiting:
            self._go_on(dispatch, calls)

    def _serves(self, name: str) -> bool:
        cell = self.sim.procs.get(self.routes.get(name, ""))
        return cell is not None and not cell.gone and bool(getattr(cell, "serves", ""))

    def _go_on(self, dispatch: ev.Dispatch, calls: int) -> None:
        if calls == 0:
            self._end(dispatch)
        elif self._serves(dispatch.execution):
            self.after(self.sim.rng.expovariate(0.4), lambda: self._go_on(dispatch, calls - 1))
        else:
            self.waiting.append((dispatch, calls))

    def _end(self, dispatch: ev.Dispatch) -> None:
        fate = self.sim.rng.random()
        outcome: ev.Outcome = "graded" if fate < 0.9 else "retry" if fate < 0.95 else "excluded"
        self.say(
            ev.Finished(
                execution=dispatch.execution,
                attempt=dispatch.attempt,
                outcome=outcome,
                reward=1.0 if outcome == "graded" else None,
                tokens_sampled=10,
            )
        )


class ProcessorProc(Folding):
    """Packs in the journalled order; a new incarnation derives the same micro-steps and goes on after them."""

    def wants(self, line: Line) -> bool:
        return line.writer in ("scheduler", "processor")

    def start(self) -> None:
        super().start()
        self.step = 0
        self.names: dict[int, list[str]] = {}

    def hear(self, line: Line) -> None:
        self.take([line])
        if self.state.incarnation(self.name) != self.incarnation:
            return
        if not self.step:
            self._begin(max((step for step, found in self.state.steps.items() if found.packed), default=0) + 1)
        self._advance()

    def _begin(self, step: int) -> None:
        self.step, self.fed, self.flushes, self.open, self.emitted = step, 0, 0, 0, 0

    def _advance(self) -> None:
        found = self.state.steps.get(self.step)
        if found is None:
            return
        while True:
            while self.flushes < len(found.flushes) and found.flushes[self.flushes] <= self.fed:
                self._emit(1 if self.open else 0)
                self.open = 0
                self.flushes += 1
            if self.fed == len(found.consumed):
                break
            consumed = found.consumed[self.fed]
            samples = 0 if consumed.void else random.Random(consumed.group).choice([0, 1, 3, 5, 9])
            self.fed += 1
            self._emit((self.open + samples) // FULL)
            self.open = (self.open + samples) % FULL
        if found.filled:
            self._emit(1 if self.open else 0)
            self.say(
                ev.Packed(
                    step=self.step,
                    microsteps=list(found.microsteps) + self.told,
                    executions=len(found.consumed),
                    tokens_sampled=0,
                    tokens_trained=0,
                    tokens_dropped={},
                )
            )
            self._begin(self.step + 1)
            self.after(0.1, self._advance)

    @property
    def told(self) -> list[str]:
        """Announced by this incarnation, and not yet read back."""
        known = self.state.steps[self.step].microsteps
        return [name for name in self.names.get(self.step, []) if name not in known]

    def _emit(self, count: int) -> None:
        for _ in range(count):
            number = self.emitted
            self.emitted += 1
            if number < len(self.state.steps[self.step].microsteps) + len(self.told):
                continue
            name = f"step-{self.step:06d}/{self.incarnation}-{number:05d}"
            self.names.setdefault(self.step, []).append(name)
            self.say(ev.MicroStepReady(step=self.step, microstep=name, digest="d", tokens=8, targets=4, samples=FULL))


class CellProc(Proc):
    """A cell's lead, order by order as gyre/processes/cell.py."""

    def wants(self, line: Line) -> bool:
        event = line.event
        if line.writer == "scheduler":
            return isinstance(event, ev.Accepted | ev.TrainOrdered | ev.ServeOrdered) or (
                getattr(event, "cell", None) == self.name
            )
        return isinstance(event, ev.Merged | ev.Refused) and event.source == self.name

    def start(self) -> None:
        self.orders: deque[Any] = deque()
        self.current = "starting"
        self.engine_on = True
        self.lineage = 0
        self.target = (0, 0)
        self.serves = ""
        self.held = ""
        """manifest of the weights that were pulled last"""
        self.buffer: list[str] = []
        self.frozen = False
        self.offers = 0
        self.deferred: list[ev.Granted] = []
        self.fenced: set[tuple[str, int]] = set()
        self.roles: dict[str, Any] = {}
        self.incarnations: dict[str, int] = {}
        self.idle = False
        self.mine: dict[int, str] = {}
        for line in self.inbox:
            self._watch(line.event)
        self.work = self._work()
        self._step()

    def _step(self) -> None:
        pause = next(self.work)
        self.idle = pause is None
        if pause is not None:
            self.after(pause, self._step)

    def _watch(self, event: Any) -> None:
        if isinstance(event, ev.TrainOrdered | ev.ServeOrdered):
            self.roles[event.cell] = event
        elif isinstance(event, ev.Accepted):
            self.incarnations[event.writer] = event.incarnation

    def hear(self, line: Line) -> None:
        event = line.event
        self._watch(event)
        if isinstance(event, ev.Accepted):
            if (event.writer, event.incarnation) == (self.name, self.incarnation):
                self.accepted = True
        elif isinstance(event, ev.Merged | ev.Refused):
            if event.source_incarnation == self.incarnation:
                self.orders.append(event)
        elif event.cell != self.name or event.incarnation != self.incarnation:
            return
        elif isinstance(event, ev.RestartOrdered):
            self.sim.kill(self)
            return
        else:
            self.orders.append(event)
        if self.idle:
            self.idle = False
            self._step()

    def superseded(self) -> bool:
        return any(isinstance(order, ev.TrainOrdered | ev.ServeOrdered) for order in self.orders)

    def enter(self, state: ev.CellState, lineage: int = 0, step: int = 0) -> None:
        self.say(ev.CellEntered(state=state, lineage=lineage, step=step))
        self.current, self.target = state, (lineage, step)

    def _work(self) -> Pause:
        yield self.sim.draw(0.5, 4.0)
        self.enter("ready")
        while not self.accepted:
            yield None
        while True:
            while self.orders:
                yield from self._do(self.orders.popleft())
            yield None

    def _do(self, order: Any) -> Pause:
        do = {
            ev.LineageOrdered: self._open_lineage,
            ev.TrainOrdered: self._train_role,
            ev.ServeOrdered: self._serve_role,
            ev.Granted: self._train,
            ev.OfferOrdered: self._offer,
            ev.Merged: self._answered,
            ev.Refused: self._answered,
            ev.MergeOrdered: self._merge,
            ev.FenceOrdered: self._fence,
            ev.CommitOrdered: self._commit,
            ev.CheckpointOrdered: self._checkpoint,
        }[type(order)]
        yield from do(order)

    def publish(self, lineage: int, step: int) -> str:
        manifest = f"{self.name}.{self.incarnation}/{lineage}.{step}"
        self.sim.manifests[manifest] = self
        self.mine[step] = manifest
        return manifest

    def _open_lineage(self, order: ev.LineageOrdered) -> Pause:
        yield self.sim.draw(0.2, 2.0)
        openings = [(n, found.opened.step) for n, found in fold_all(self.sim.lines).lineages.items()]
        known = [(s, made) for made, s in self.sim.checkpoints if self.counts(made, s, openings)]
        step, origin = max(known, default=(0, 0))
        self.lineage, self.buffer, self.opened = order.lineage, [], step
        yield from self.load(origin, step)
        version = self.sim.settings.version(step)
        self.say(
            ev.LineageOpened(
                lineage=order.lineage,
                step=step,
                version=version,
                weight_version=f"{order.lineage}.{version}-{step}",
                manifest=self.publish(order.lineage, step),
            )
        )

    def counts(self, made: int, step: int, openings: list[tuple[int, int]]) -> bool:
        """Does lineage `made`'s checkpoint of `step` stand, after these (lineage, step) openings?"""
        return all(made >= lineage or step <= begun for lineage, begun in openings)

    # What a cell's ranks do, for a model of them.

    def load(self, lineage: int, step: int) -> Pause:
        """Take the weights of a checkpoint."""
        yield from ()

    def sum(self, microstep: str) -> Pause:
        """Add a gradient to the own buffer."""
        yield self.sim.draw(0.3, 1.5) * self.sim.speed

    def freeze(self, manifest: str) -> Pause:
        """Publish the own buffer."""
        yield 0.1

    def add(self, manifest: str) -> Pause:
        """Add a contribution, pulled whole and verified."""
        yield from ()

    def optimize(self, order: ev.CommitOrdered) -> Pause:
        yield self.sim.draw(0.2, 1.0)

    def save(self, lineage: int, step: int) -> Pause:
        """Write a checkpoint."""
        self.sim.checkpoints.append((lineage, step))
        yield from ()

    def _pull(self, manifest: str, lineage: int, step: int) -> Iterator[float | None]:
        self.pulled = False
        while True:
            yield self.sim.draw(0.1, 1.0)
            if manifest in self.sim.manifests:
                self.held = manifest
                self.say(ev.Pulled(lineage=lineage, step=step, seconds=0.1, nbytes=1))
                self.pulled = True
                return
            if self.superseded():
                return
            yield 0.5

    def _train_role(self, order: ev.TrainOrdered) -> Pause:
        if self.current == "rollout" or self.engine_on:
            self.enter("draining")
            self.say(ev.ServingEnded())
            self.serves = ""
            yield self.sim.draw(0.1, 1.0)
            self.enter("releasing")
            yield self.sim.draw(0.1, 1.0)
            self.engine_on = False
        if self.lineage != order.lineage:
            self.enter("joining")
            yield from self._pull(order.manifest, order.lineage, order.step - 1)
            if not self.pulled:
                return
            self.buffer = []
        self.frozen, self.deferred = False, []
        self.enter("training", order.lineage, order.step)

    def _serve_role(self, order: ev.ServeOrdered) -> Pause:
        if self.current == "training":
            self.enter("leaving")
            if self.buffer:
                self.sim.note("gradients thrown away")
            self.buffer = []
        self.enter("resuming")
        self.say(ev.ServingEnded())
        self.serves, self.frozen, self.deferred = "", False, []
        yield from self._pull(order.manifest, order.lineage, order.step)
        if not self.pulled:
            return
        yield self.sim.draw(0.2, 1.5)
        self.engine_on, self.serves = True, order.weight_version
        self.say(ev.Serving(lineage=order.lineage, version=order.version, weight_version=order.weight_version))
        self.enter("rollout")

    def _train(self, grant: ev.Granted) -> Pause:
        if self.frozen:
            self.deferred.append(grant)
            return
        if (grant.lineage, grant.step) != self.target:
            self.sim.note("stale grant passed over")
            return
        for name in grant.microsteps:
            yield from self.sum(name)
            if name in self.buffer:
                raise Violation(f"{name} is in the buffer of {self.name} already")
            self.buffer.append(name)
        self.say(ev.Done(grant=grant.grant, lineage=grant.lineage, step=grant.step, microsteps=grant.microsteps))

    def _offer(self, order: ev.OfferOrdered) -> Pause:
        self.offers += 1
        self.frozen = True
        manifest = f"g/{self.name}.{self.incarnation}/{self.offers}"
        yield from self.freeze(manifest)
        self.sim.manifests[manifest] = self
        self.say(
            ev.Offered(
                lineage=order.lineage,
                step=order.step,
                number=self.offers,
                microsteps=list(self.buffer),
                manifest=manifest,
            )
        )

    def _answered(self, answer: ev.Merged | ev.Refused) -> Pause:
        if not self.frozen or answer.number != self.offers:
            return
        yield 0.05
        self.buffer, self.frozen = [], False
        self.sim.manifests.pop(f"g/{self.name}.{self.incarnation}/{answer.number}", None)
        self.orders.extendleft(reversed(self.deferred))
        self.deferred = []

    def _merge(self, order: ev.MergeOrdered) -> Pause:
        yield self.sim.draw(0.1, 1.0)
        about = {
            "lineage": order.lineage,
            "step": order.step,
            "source": order.source,
            "source_incarnation": order.source_incarnation,
            "number": order.number,
        }
        fenced = (order.source, order.source_incarnation) in self.fenced
        fails = order.manifest not in self.sim.manifests or self.sim.rng.random() < self.sim.faults.refuse
        if fenced or fails:
            self.say(ev.Refused(**about, reason="fenced" if fenced else "pull failed"))
            return
        if set(order.microsteps) & set(self.buffer):
            raise Violation(f"merged twice: {order}")
        yield from self.add(order.manifest)
        self.buffer += order.microsteps
        self.say(ev.Merged(**about, microsteps=order.microsteps))

    def _fence(self, order: ev.FenceOrdered) -> Pause:
        self.fenced.add((order.source, order.source_incarnation))
        self.say(ev.Fenced(lineage=order.lineage, source=order.source, source_incarnation=order.source_incarnation))
        yield 0.01

    def _commit(self, order: ev.CommitOrdered) -> Pause:
        if self.target != (order.lineage, order.step):
            raise Violation(f"commit of step {order.step} in state {self.current}, {self.target}")
        if sorted(self.buffer) != sorted(order.microsteps):
            raise Violation(f"commit of {order.microsteps} with {self.buffer} in the buffer")
        yield from self.optimize(order)
        self.buffer = []
        if order.checkpoint:
            yield from self.save(order.lineage, order.step)
        self.say(
            ev.Committed(
                lineage=order.lineage,
                step=order.step,
                version=order.version,
                weight_version=f"{order.lineage}.{order.version}-{order.step}",
                manifest=self.publish(order.lineage, order.step),
                checkpointed=order.checkpoint,
                skipped=not order.microsteps,
            )
        )
        self._retire(order.step)

    def _checkpoint(self, order: ev.CheckpointOrdered) -> Pause:
        if order.step == max(self.mine, default=0):
            yield self.sim.draw(0.2, 1.0)
            self.sim.checkpoints.append((order.lineage, order.step))
            self.say(ev.Checkpointed(lineage=order.lineage, step=order.step))

    def _retire(self, step: int) -> None:
        """gyre/processes/leases.py on what this process has read."""
        mu = self.sim.settings.steps_per_burst
        served = self.mine.get(step // mu * mu, self.mine[self.opened])
        leased = {
            order.manifest
            for cell, order in self.roles.items()
            if cell != self.name and order.incarnation == self.incarnations.get(cell, 0)
        }
        keep = leased | {served, self.mine[step]}
        for manifest in set(self.mine.values()) - keep:
            self.sim.manifests.pop(manifest, None)
