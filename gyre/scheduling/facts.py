"""Questions that several decisions ask of the folded state.

Owns the definitions of: alive, role, settled, the step in hand, merged, pending. All pure.
Invariant: a micro-step of the step in hand is, within the reigning lineage, exactly one of merged, held or pending.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gyre.ledger import events as ev
from gyre.ledger.state import CellIncarnation, Lineage, RunState
from gyre.scheduling.settings import Settings


@dataclass(frozen=True)
class World:
    """One moment as the decisions see it.

    `dead`: writers whose liveness counter stands still. `waiting`: for each cell, seconds since its role order or its
    state last changed. Both are judged by the scheduler's own monotonic clock.
    """

    state: RunState
    settings: Settings
    dead: frozenset[str] = frozenset()
    waiting: Mapping[str, float] = field(default_factory=dict)

    # ---- cells ----

    def alive(self, cell: str) -> bool:
        found = self.state.cell(cell)
        return cell not in self.dead and found is not None and found.state not in ("starting", "failed")

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

    def training(self, cell: str) -> bool:
        return self.alive(cell) and isinstance(self.role_order(cell), ev.TrainOrdered)

    def returning(self, cell: str) -> bool:
        """Ordered to train for a burst that is over: on its way back."""
        order = self.role_order(cell)
        if self.settings.mode == "async" or not isinstance(order, ev.TrainOrdered):
            return False
        return self.settings.burst_of(order.step) < self.burst

    def will_serve(self, cell: str) -> bool:
        """Serves now or will without another decision in its way."""
        return self.alive(cell) and (not self.training(cell) or self.returning(cell))

    def serving_cells(self) -> list[str]:
        return [cell for cell in self.settings.cells if self.alive(cell) and not self.training(cell)]

    # ---- lineage, step, burst ----

    @property
    def burst(self) -> int:
        return max(self.state.bursts, default=0)

    def reign(self) -> Lineage | None:
        """The reigning lineage, if its core is alive; None while a new one has to open."""
        lineage = self.state.reign()
        if lineage is None or self.state.incarnation(lineage.cell) != lineage.incarnation:
            return None
        return lineage if self.alive(lineage.cell) else None

    @property
    def step(self) -> int:
        """The step in hand: the next one to commit."""
        lineage = self.state.reign()
        return lineage.step() + 1 if lineage is not None else 1

    def served(self, lineage: Lineage) -> ev.Committed | ev.LineageOpened:
        """The weights that rollout should have now: those of the burst's boundary, or what the lineage has."""
        boundary = self.settings.first_step(max(1, self.burst)) - 1
        return lineage.committed.get(boundary, lineage.opened)

    def to_serve(self, lineage: Lineage, cell: str) -> ev.Committed | ev.LineageOpened:
        """The weights that `cell` should serve. The core serves what it holds: it never goes back to older weights."""
        return self.newest(lineage) if cell == lineage.cell else self.served(lineage)

    def newest(self, lineage: Lineage) -> ev.Committed | ev.LineageOpened:
        return lineage.committed.get(lineage.step(), lineage.opened)

    # ---- micro-steps ----

    def merged(self, lineage: Lineage, step: int) -> set[str]:
        """Micro-steps of `step` that are in the core's buffer: its own done ones and merged contributions."""
        core = self.state.cells.get(lineage.cell, {}).get(lineage.incarnation, CellIncarnation())
        own = {m for d in core.done.values() if (d.lineage, d.step) == (self.number, step) for m in d.microsteps}
        return own.union(*(m.microsteps for m in lineage.merged if m.step == step))

    @property
    def number(self) -> int:
        return max(self.state.lineages, default=0)

    def lost(self, lineage: Lineage, grant: ev.Granted) -> bool:
        """Will this grant never be merged any more? Only the core's word counts: fenced, or refused."""
        if any(
            (f.source, f.source_incarnation) == (grant.cell, grant.incarnation) for f in lineage.fenced
        ):
            return True
        found = self.state.cells.get(grant.cell, {}).get(grant.incarnation)
        refused = {
            r.number
            for r in lineage.refused
            if (r.source, r.source_incarnation) == (grant.cell, grant.incarnation)
        }
        return found is not None and any(
            set(grant.microsteps) <= set(offer.microsteps)
            for number, offer in found.offers.items()
            if number in refused
        )

    def held(self, lineage: Lineage, step: int) -> set[str]:
        """Micro-steps of `step` that a cell works on or has in its buffer."""
        return {
            m
            for grant in self.grants(step)
            if not self.lost(lineage, grant)
            for m in grant.microsteps
        }

    def grants(self, step: int) -> list[ev.Granted]:
        """Grants of `step` in the reigning lineage."""
        found = self.state.steps.get(step)
        number = self.number
        return [g for g in found.grants if g.lineage == number] if found is not None else []

    def pending(self, lineage: Lineage, step: int) -> list[str]:
        """Micro-steps of `step` to be granted, in the order of their announcement."""
        found = self.state.steps.get(step)
        if found is None:
            return []
        taken = self.merged(lineage, step) | self.held(lineage, step)
        return [name for name in found.microsteps if name not in taken]

    def unfinished(self, cell: str) -> list[ev.Granted]:
        """Grants of the reigning lineage that this cell's incarnation has not reported done."""
        found = self.state.cell(cell)
        done = found.done if found is not None else {}
        incarnation = self.state.incarnation(cell)
        return [
            g
            for g in self.grants(self.step)
            if (g.cell, g.incarnation) == (cell, incarnation) and g.grant not in done
        ]

    def unmerged(self, lineage: Lineage, cell: str) -> list[str]:
        """Micro-steps in this cell's buffer that the core does not have (and has not refused)."""
        found = self.state.cell(cell)
        if found is None or cell == lineage.cell:
            return []
        merged = self.merged(lineage, self.step)
        granted = {g.grant: g for g in self.grants(self.step)}
        return [
            m
            for done in found.done.values()
            if done.grant in granted and not self.lost(lineage, granted[done.grant])
            for m in done.microsteps
            if m not in merged
        ]
