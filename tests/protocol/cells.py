"""A cell whose ranks are modelled: what lies in each rank's buffer, and from which weights it came.

Invariant: every pause is a place where the process may die, or any other may act; between two ranks' additions there
is one. A violation is raised where it happens: a step made of anything but its packed micro-steps, each once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from gyre.ledger import events as ev
from tests.protocol.world import Free, Weights
from tests.scheduling.processes import CellProc, Pause
from tests.scheduling.world import Killed, Violation

NOW = 0.0


class RankedCell(CellProc):
    """`where`: what its ranks are in the midst of, "" between operations."""

    sim: Free
    where: str = ""
    broken = False
    """a rank is gone: the next operation ends the incarnation"""
    pulling = ""
    """manifest of the weights that its ranks are pulling"""

    def start(self) -> None:
        self.weights: Weights = (0, 0)
        super().start()

    @property
    def buffer(self) -> list[str]:  # type: ignore[override]
        return self._buffer

    @buffer.setter
    def buffer(self, names: list[str]) -> None:
        """The lead's record of what is in the ranks' buffers; emptying it is the ranks' `zero`."""
        self._buffer = names
        if not names:
            self.where = ""
            self.sums: list[list[tuple[str, Weights]]] = [[] for _ in range(self.sim.ranks)]

    def at(self, where: str) -> Pause:
        """A pause in which the cell is at `where`."""
        self.where = where
        yield NOW
        if self.broken:
            self.enter("failed")
            raise Killed

    def load(self, lineage: int, step: int) -> Pause:
        yield from self.at("loading a checkpoint")
        if step:
            made, weights = self.sim.saved[step]
            if made != lineage:
                raise Violation(f"the checkpoint of step {step} is of lineage {made}, not {lineage}")
            self.weights = weights
        else:
            self.weights = (0, 0)
        self.where = ""

    def publish(self, lineage: int, step: int) -> str:
        manifest = super().publish(lineage, step)
        self.sim.published[manifest] = self.weights
        self.where = ""
        return manifest

    def _pull(self, manifest: str, lineage: int, step: int) -> Iterator[float | None]:
        self.pulling = manifest
        yield from super()._pull(manifest, lineage, step)
        self.pulling = ""

    def _retire(self, step: int) -> None:
        self.sim.look(self)
        super()._retire(step)
        for cell, other in self.sim.procs.items():
            if not isinstance(other, RankedCell) or other.gone or other.pulling not in self.mine.values():
                continue
            if other.pulling not in self.sim.manifests and self.sim.ordered(cell) == other.pulling:
                raise Violation(f"{cell} is pulling {other.pulling}, as ordered, and {self.name} gives it up")

    def enter(self, state: ev.CellState, lineage: int = 0, step: int = 0) -> None:
        if state == "training" and self.held and self.lineage != lineage:
            self.weights = self.sim.published[self.held]
        super().enter(state, lineage, step)

    def sum(self, microstep: str) -> Pause:
        for rank, sums in enumerate(self.sums):
            yield from self.at("summing" if rank == 0 else "between ranks' sums")
            sums.append((microstep, self.weights))
        yield from self.at("summed and not done")
        self.where = ""

    def freeze(self, manifest: str) -> Pause:
        yield from self.at("freezing")
        self.sim.contributions[manifest] = [list(sums) for sums in self.sums]
        yield from self.at("frozen and not offered")
        self.where = "offered"

    def add(self, manifest: str) -> Pause:
        staged = self.sim.contributions[manifest]
        for rank, (sums, gradients) in enumerate(zip(self.sums, staged, strict=True)):
            yield from self.at("pulled" if rank == 0 else "between ranks' adds")
            sums += gradients
        yield from self.at("added and not merged")
        self.where = ""

    def optimize(self, order: ev.CommitOrdered) -> Pause:
        yield from self.at("about to commit")
        for sums in self.sums:
            if Counter(name for name, _ in sums) != Counter(order.microsteps):
                raise Violation(f"step {order.step} is made of {sorted(sums)}, not of {order.microsteps}")
            if any(weights != self.weights for _, weights in sums):
                raise Violation(f"step {order.step} from {self.weights} has gradients of other weights: {sums}")
        if self.weights[1] != order.step - 1:
            raise Violation(f"step {order.step} is made from {self.weights}")
        made = (order.lineage, order.step)
        if made in self.sim.parents:
            raise Violation(f"{made} is committed twice")
        self.sim.parents[made], self.weights = self.weights, made
        yield from self.at("stepped")

    def save(self, lineage: int, step: int) -> Pause:
        yield from self.at("saving")
        self.sim.checkpoints = [kept for kept in self.sim.checkpoints if kept[1] != step] + [(lineage, step)]
        self.sim.saved[step] = (lineage, self.weights)
        yield from self.at("saved and not committed")
        self.where = ""
