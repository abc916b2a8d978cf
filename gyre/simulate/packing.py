"""Training work in whole micro-steps.

Owns the names and costs of micro-steps. Invariant: a step's micro-steps hold its work, rounded once at the step's end;
what of a group does not fill a micro-step goes into the next group's, as samples do when they are packed. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable


class Packing:
    """`streaming`: micro-steps are out as they fill; else all of a step's at its end."""

    def __init__(self, microstep: float, streaming: bool) -> None:
        self._microstep, self._streaming = microstep, streaming
        self._rest = 0.0
        self._made = 0
        self._held: list[str] = []
        self.seconds: dict[str, float] = {}
        self.total = 0.0
        """Cell-seconds of everything packed."""

    def add(self, step: int, works: Iterable[float]) -> list[str]:
        """A group's work (cell-seconds of each execution): the micro-steps that it closes."""
        self._rest += sum(works)
        whole = int(self._rest / self._microstep)
        self._rest -= whole * self._microstep
        return self._out(step, whole)

    def end(self, step: int) -> list[str]:
        """The last micro-steps of a step. What is left over is rounded: a step's error is half a micro-step."""
        last = round(self._rest / self._microstep) if self._made else int(self._rest > 0.0)
        self._rest = 0.0
        closed = self._out(step, last)
        if not self._streaming:
            closed, self._held = self._held, []
        self._made = 0
        return closed

    def _out(self, step: int, count: int) -> list[str]:
        names = [f"step-{step:06d}/1-{self._made + index:05d}" for index in range(count)]
        self._made += count
        self.total += count * self._microstep
        self.seconds.update(dict.fromkeys(names, self._microstep))
        if self._streaming:
            return names
        self._held += names
        return []
