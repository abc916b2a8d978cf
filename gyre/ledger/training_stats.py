"""What training told of a step: sums over its micro-steps, and the trainer-engine difference by sample length.

Owns the names of the statistics in `done` lines. Invariant: every statistic is a sum, or an extreme if its name says
so, so it does not matter which cells trained which micro-steps.

The difference is log pi_trainer - log pi_engine under the same weights: what the objective takes for a change of the
policy although nothing changed. Its unit is that of the ratio: a sample's mean over its targets for gspo, a target for
the other objectives. Averaged over a long sample it is small, so it is kept apart by the sample's number of targets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct

from gyre.ledger.state import CellIncarnation, RunState

BOUNDS = (16, 64, 256, 1024, 4096, 16384)
"""Samples of fewer targets than the first, then from each bound to below the next; the last class is open."""
ALARM = 3.0
"""A clip narrower than this many spreads clips noise."""


class LengthDifference(Struct, frozen=True, kw_only=True):
    """Of samples with `least` <= targets < `below` (0: no bound): the units compared, their mean difference, and the
    spread: the root of their mean square. All in nats."""

    least: int
    below: int
    units: int
    mean: float
    spread: float

    @property
    def lengths(self) -> str:
        return f"{self.least}-{self.below - 1}" if self.below else f"{self.least}+"


def statistics_of(lengths: Sequence[int], differences: Sequence[float]) -> dict[str, float]:
    """The statistics of units: for each the number of targets of its sample, and its difference."""
    found: dict[str, float] = {}
    for length, difference in zip(lengths, differences, strict=True):
        place = sum(length >= bound for bound in BOUNDS)
        for name, value in (("units", 1.0), ("sum", difference), ("squares", difference * difference)):
            key = f"difference_{name}_{place}"
            found[key] = found.get(key, 0.0) + value
    return found


def differences(stats: dict[str, float]) -> list[LengthDifference]:
    """The classes that have units, shortest samples first."""
    found = []
    for place, (least, below) in enumerate(zip((1, *BOUNDS), (*BOUNDS, 0), strict=True)):
        units = stats.get(f"difference_units_{place}", 0.0)
        if units:
            mean, squares = (stats.get(f"difference_{name}_{place}", 0.0) / units for name in ("sum", "squares"))
            found.append(
                LengthDifference(least=least, below=below, units=int(units), mean=mean, spread=math.sqrt(squares))
            )
    return found


def widest(found: Sequence[LengthDifference]) -> LengthDifference | None:
    """The class with the largest spread."""
    return max(found, key=lambda each: each.spread, default=None)


def alarm(found: Sequence[LengthDifference], clip: tuple[float, float]) -> str:
    """Why the clip is too narrow for what trainer and engine differ by; empty when it is not."""
    worst = widest(found)
    if worst is None or min(clip) >= ALARM * worst.spread:
        return ""
    return (
        f"objective.clip {min(clip):.3g} is under {ALARM:g} x {worst.spread:.3g}, the spread between trainer and engine"
        f" for samples of {worst.lengths} targets: it clips noise"
    )


def training_stats(state: RunState, step: int, lineage: int) -> dict[str, float]:
    """Sums (and extremes) of the training statistics of a step, each micro-step once."""
    total: dict[str, float] = {}
    seen: set[str] = set()
    for grant in state.steps[step].grants if step in state.steps else []:
        cell = state.cells.get(grant.cell, {}).get(grant.incarnation, CellIncarnation())
        done = cell.done.get(grant.grant)
        if grant.lineage != lineage or done is None or seen & set(done.microsteps):
            continue
        seen.update(done.microsteps)
        for name, value in done.stats.items():
            if name.endswith("_max"):
                total[name] = max(total.get(name, value), value)
            elif name.endswith("_min"):
                total[name] = min(total.get(name, value), value)
            else:
                total[name] = total.get(name, 0.0) + value
    return total
