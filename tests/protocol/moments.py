"""Moments of the protocol at which something can be made to fail."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.protocol.cells import RankedCell
from tests.protocol.world import Free

CORE = [
    "loading a checkpoint",
    "summing",
    "between ranks' sums",
    "summed and not done",
    "pulled",
    "between ranks' adds",
    "added and not merged",
    "about to commit",
    "stepped",
    "saving",
    "saved and not committed",
]
SATELLITE = ["summing", "between ranks' sums", "summed and not done", "freezing", "frozen and not offered", "offered"]


def at(sim: Free, cell: str, where: str) -> bool:
    proc = sim.procs[cell]
    return isinstance(proc, RankedCell) and not proc.gone and proc.where == where


def merged_unheard(sim: Free) -> bool:
    """The core has said `merged`, and the satellite's buffer is frozen still."""
    state = sim.known()
    return any(
        _waits(sim, merged.source, merged.number) for found in state.lineages.values() for merged in found.merged
    )


def _waits(sim: Free, cell: str, number: int) -> bool:
    proc = sim.procs[cell]
    if not isinstance(proc, RankedCell) or proc.gone or not hasattr(proc, "orders"):
        return False  # one that was born and has not begun has no buffer yet
    return proc.frozen and proc.offers == number


def fencing(sim: Free) -> bool:
    """A fence was ordered, and the core has not said so."""
    state = sim.known()
    reign = state.reign()
    said = {(f.source, f.source_incarnation) for f in reign.fenced} if reign is not None else set()
    return bool({(f.source, f.source_incarnation) for f in state.fences_ordered} - said)


def reach(sim: Free, moment: Callable[[Free], bool], seed: int, most: int = 3000) -> bool:
    """Go on, in an order drawn from `seed`, until the moment comes, or nobody is left who would do anything."""
    rng = random.Random(seed)
    for _ in range(most):
        if moment(sim) or sim.ended or sim.waits_for_nothing:
            break
        sim.step(rng.randrange(1 << 30))
    return moment(sim)
