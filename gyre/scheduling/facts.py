"""Questions that several decisions ask of the folded state.

Owns the definitions of: alive, role, settled, the step in hand, merged, pending. All pure.
Invariant: a micro-step of the step in hand is, within the reigning lineage, exactly one of merged, held or pending.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile

from gyre.ledger import events as ev
from gyre.ledger.state import CellIncarnation, Lineage, RunState
from gyre.scheduling.settings import Settings


@dataclass(frozen=True)
class World:
    """One moment as the decisions see it: make another after each fold, for what it has found out it keeps.

    `dead`: writers whose liveness counter stands still. `waiting`: for each cell, seconds since its role order or its
    state last changed. `pausing`: executions whose next attempt is not due yet. All are judged by the scheduler's own
    monotonic clock.
    """

    state: RunState
    settings: Settings
    dead: frozenset[str] = frozenset()
    waiting: Mapping[str, float] = field(default_factory=dict)
    pausing: frozenset[str] = frozenset()

    # ---- cells ----

    @cached_property
    def _alive(self) -> frozenset[str]:
        found = {cell: self.state.cell(cell) for cell in self.settings.cells if cell not in self.dead}
        return frozenset(
            c for c, said in found.items() if said is not None and said.state not in ("starting", "failed")
        )

    def alive(self, cell: str) -> bool:
        return cell in self._alive

    def role_order(self, cell: str) -> ev.TrainOrdered | ev.ServeOrdered | None:
        """The newest role order for the accepted incarnation of `cell`."""
        order = self.state.roles.get(cell)
        return order if order is not None and order.incarnation == self.state.incarnation(cell) else None

    def settled(self, cell: str) -> bool:
        """Has the cell done what its newest role order says?"""
        order, found = self.role_order(cell), self.state.cell(cell)
        if order is None or found is None:
            return True
        if isinstance(order, ev.ServeOrdered):
            return found.serving is not None and found.serving.weight_version == order.weight_version
        return found.training == (order.lineage, order.step)

    @cached_property
    def _training(self) -> frozenset[str]:
        return frozenset(c for c in self._alive if isinstance(self.role_order(c), ev.TrainOrdered))

    def training(self, cell: str) -> bool:
        return cell in self._training

    def joined(self, cell: str) -> bool:
        """Does it sum gradients of the step in hand?"""
        found = self.state.cell(cell)
        return found is not None and self.training(cell) and found.training == (self.number, self.step)

    def returning(self, cell: str) -> bool:
        """Ordered to train for a burst that is over, every step of it committed: on its way back."""
        order = self.role_order(cell)
        if self.settings.mode == "async" or not isinstance(order, ev.TrainOrdered):
            return False
        return self.step > self.settings.steps or self.settings.burst_of(order.step) < self.settings.burst_of(self.step)

    def will_serve(self, cell: str) -> bool:
        """Serves now or will without another decision in its way."""
        if not self.alive(cell) or self.settings.only_trains(cell):
            return False
        return not self.training(cell) or self.returning(cell)

    def serving_cells(self) -> list[str]:
        return [
            cell
            for cell in self.settings.cells
            if self.alive(cell) and not self.training(cell) and not self.settings.only_trains(cell)
        ]

    def starved(self) -> bool:
        """Are cells lost, so that those which serve cannot carry the waterlevel? Then satellites come back."""
        carried = self.settings.cell_room * len(self.serving_cells())
        return self.settings.mode != "async" and self.state.waterlevel > carried

    # ---- lineage, step, burst ----

    @cached_property
    def burst(self) -> int:
        return max(self.state.bursts, default=0)

    @cached_property
    def _reign(self) -> Lineage | None:
        lineage = self.state.reign()
        if lineage is None or self.state.incarnation(lineage.cell) != lineage.incarnation:
            return None
        return lineage if self.alive(lineage.cell) else None

    def reign(self) -> Lineage | None:
        """The reigning lineage, if its core is alive; None while a new one has to open."""
        return self._reign

    @cached_property
    def step(self) -> int:
        """The step in hand: the next one to commit."""
        lineage = self.state.reign()
        return lineage.step() + 1 if lineage is not None else 1

    @cached_property
    def number(self) -> int:
        """The newest lineage."""
        return max(self.state.lineages, default=0)

    def served(self, lineage: Lineage) -> ev.Committed | ev.LineageOpened:
        """The weights that rollout should have now: those of the burst's boundary, or what the lineage has."""
        return lineage.committed.get(self.settings.boundary(self.burst), lineage.opened)

    def to_serve(self, lineage: Lineage, cell: str) -> ev.Committed | ev.LineageOpened:
        """The weights that `cell` should serve. The core serves what it holds: it never goes back to older weights."""
        return self.newest(lineage) if cell == lineage.cell else self.served(lineage)

    def newest(self, lineage: Lineage) -> ev.Committed | ev.LineageOpened:
        return lineage.committed.get(lineage.step(), lineage.opened)

    # ---- micro-steps of the step in hand, in the reigning lineage ----

    @cached_property
    def grants(self) -> list[ev.Granted]:
        found = self.state.steps.get(self.step)
        return [g for g in found.grants if g.lineage == self.number] if found is not None else []

    @cached_property
    def merged(self) -> frozenset[str]:
        """What is in the core's buffer: its own done micro-steps, and merged contributions."""
        lineage = self.state.reign()
        if lineage is None:
            return frozenset()
        core = self.state.cells.get(lineage.cell, {}).get(lineage.incarnation, CellIncarnation())
        own = [
            m
            for g in self.grants
            if (g.cell, g.incarnation) == (lineage.cell, lineage.incarnation) and g.grant in core.done
            for m in g.microsteps
        ]
        return frozenset(own).union(*(a.microsteps for a in self.answers if isinstance(a, ev.Merged)))

    @cached_property
    def answers(self) -> list[ev.Merged | ev.Refused]:
        """What the core has said to the contributions of this step."""
        lineage, step = self.state.reign(), self.step
        if lineage is None:
            return []
        # both lists are in the order of the steps
        merged = takewhile(lambda m: m.step == step, reversed(lineage.merged))
        refused = takewhile(lambda r: r.step == step, reversed(lineage.refused))
        return [*merged, *refused]

    @cached_property
    def fenced(self) -> frozenset[tuple[str, int]]:
        """Incarnations whose contributions the core refuses for good."""
        lineage = self.state.reign()
        return (
            frozenset((f.source, f.source_incarnation) for f in lineage.fenced) if lineage is not None else frozenset()
        )

    def is_fenced(self, cell: str) -> bool:
        return (cell, self.state.incarnation(cell)) in self.fenced

    @cached_property
    def lost(self) -> frozenset[int]:
        """Grants that will never be merged any more. Only the core's word counts: fenced, or refused."""
        lost = {g.grant for g in self.grants if (g.cell, g.incarnation) in self.fenced}
        for answer in self.answers:
            if isinstance(answer, ev.Merged):
                continue
            found = self.state.cells.get(answer.source, {}).get(answer.source_incarnation, CellIncarnation())
            if answer.number in found.offers:
                lost.update(found.offers[answer.number].grants)
        return frozenset(lost)

    @cached_property
    def pending(self) -> list[str]:
        """To be granted, in the order of their announcement: neither merged nor held by a cell."""
        found = self.state.steps.get(self.step)
        if found is None:
            return []
        held = {m for grant in self.grants if grant.grant not in self.lost for m in grant.microsteps}
        return [name for name in found.microsteps if name not in self.merged and name not in held]

    def unfinished(self, cell: str) -> list[ev.Granted]:
        """Grants that this cell's incarnation has not reported done."""
        found = self.state.cell(cell)
        done = found.done if found is not None else {}
        incarnation = self.state.incarnation(cell)
        return [g for g in self.grants if (g.cell, g.incarnation) == (cell, incarnation) and g.grant not in done]

    def load(self, cell: str) -> int:
        """How many grants it has not reported done."""
        return len(self.unfinished(cell))

    def offering(self, cell: str) -> bool:
        """Was an offer ordered that is not answered yet? Then its buffer is frozen or about to be."""
        incarnation, found = self.state.incarnation(cell), self.state.steps.get(self.step)
        ordered = sum(
            1
            for o in (found.offers_ordered if found is not None else ())
            if (o.cell, o.incarnation, o.lineage) == (cell, incarnation, self.number)
        )
        answered = sum(1 for a in self.answers if (a.source, a.source_incarnation) == (cell, incarnation))
        return ordered > answered

    @cached_property
    def takers(self) -> list[str]:
        """Cells that take grants now."""
        return [
            cell
            for cell in self.settings.cells
            if self.joined(cell) and not self.is_fenced(cell) and not self.offering(cell)
        ]

    def unmerged(self, lineage: Lineage, cell: str) -> list[str]:
        """Micro-steps in this satellite's buffer that the core does not have (and has not refused)."""
        found, incarnation = self.state.cell(cell), self.state.incarnation(cell)
        if found is None or cell == lineage.cell:
            return []
        return [
            m
            for g in self.grants
            if (g.cell, g.incarnation) == (cell, incarnation) and g.grant in found.done and g.grant not in self.lost
            for m in g.microsteps
            if m not in self.merged
        ]
