"""Which waiting execution starts next, when a burst has more executions than the cells have rooms.

Owns the two rules: `order`, that of the scheduler, and `probe`, which gains where rooms are short. Invariants: both are
functions of counts alone (no clock, no guess at durations from outside); executions of an earlier burst start first,
since their groups have to be consumed first; every waiting execution starts in the end. Pure.

`probe` is two observations. Executions of one group are alike, as they attempt the same task: so of each group some are
started at once, and tell about the others. And what ends a burst is its last execution: so of those that wait, those
should start first that will run longest. The group of which the least share has ended is the one that runs longest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

PROBES = 0.375
"""Share of a group that is started before the next one begins: six of sixteen."""


@dataclass(slots=True)
class Progress:
    """One group's executions, counted."""

    group: str
    burst: int
    planned: int
    started: int = 0
    ended: int = 0


StartRule = Callable[[Iterable[Progress]], Progress]
"""Of the groups that have executions waiting, in the order of their dispatch: the one whose next execution starts."""


def order(waiting: Iterable[Progress]) -> Progress:
    """Whole groups, one after the other."""
    return next(iter(waiting))


def probe(waiting: Iterable[Progress]) -> Progress:
    """Some of each group, in their order; then first the group of which the least share has ended."""
    groups = list(waiting)
    oldest = min(group.burst for group in groups)
    groups = [group for group in groups if group.burst == oldest]
    for group in groups:
        if group.started < PROBES * group.planned:
            return group
    return min(groups, key=lambda group: group.ended / group.started)


START_RULES: dict[str, StartRule] = {"order": order, "probe": probe}
