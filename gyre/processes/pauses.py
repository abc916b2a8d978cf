"""Pauses before what failed is dispatched again, kept by the scheduler: who waits holds no worker's slot.

Owns the moments until which executions wait. Invariant: an attempt follows a failed one no sooner than
`pause_before` says by the handed-in clock; a first attempt, and one after a loss or an interruption, waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from gyre.executions.backoff import pause_before
from gyre.ledger.state import Execution, RunState


class Pauses:
    """`clock`: seconds, monotonic. A new scheduler counts a pause that is under way from its own start."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: dict[tuple[str, int], float] = {}

    def now(self, state: RunState) -> frozenset[str]:
        """The executions that wait now."""
        moment = self._clock()
        until: dict[tuple[str, int], float] = {}
        for name in state.live.waiting:
            execution = state.executions[name]
            if pause := pause_after(execution):
                key = (name, execution.last())
                until[key] = self._until.get(key, moment + pause)
        self._until = until
        return frozenset(name for (name, _), end in until.items() if moment < end)


def pause_after(execution: Execution) -> float:
    """Seconds, by how many attempts ended in a failure of ours, unless the newest did not."""
    last = execution.last()
    ends = [attempt.finished for attempt in execution.attempts.values()]
    failures = sum(end is not None and end.outcome == "retry" and not end.interrupted for end in ends)
    newest = execution.attempts[last].finished if last else None
    failed = newest is not None and newest.outcome == "retry" and not newest.interrupted
    return pause_before(failures) if failed else 0.0
