"""What a run in the foreground shows: a live panel on a terminal, plain lines otherwise.

Invariant: it only reads the folded state; a run shows the same facts live as `gyre status` shows afterwards.
"""

from __future__ import annotations

import sys
import time
from typing import TextIO

from gyre.ledger.layout import RunFolder
from gyre.ledger.state import RunState
from gyre.recipe.schema import Recipe
from gyre.views.summary import Summary, summarise
from gyre.views.text import cell_line, headline, render, step_line

HEADLINE_SECONDS = 15.0
"""Without a terminal, a line about the whole run this often."""
PANEL_STEPS = 12


class Progress:
    """Use as a context; `update` takes the folded state as often as it is called."""

    def __init__(self, run: RunFolder, recipe: Recipe, out: TextIO) -> None:
        self.run, self.recipe = run, recipe
        self._out = out
        self._shown: set[tuple[int, int]] = set()
        self._headline = self._began = time.monotonic()
        self._cells: dict[str, str] = {}
        self._last: Summary | None = None
        self._live = None
        if out.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(file=out), refresh_per_second=4)

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        self.say(f"run {self.run.name} in {self.run.path}")
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        if self._live is not None:
            self._live.console.print(text, highlight=False)
        else:
            print(text, file=self._out, flush=True)

    def update(self, state: RunState) -> None:
        summary = self._last = summarise(state, self.recipe, self.run.name, str(self.run.path))
        if self._live is not None:
            self._live.update(render(summary, last=PANEL_STEPS))
            return
        for step in summary.steps:
            if (step.lineage, step.step) not in self._shown:
                self._shown.add((step.lineage, step.step))
                self.say(step_line(step, summary.steps_planned))
        if time.monotonic() - self._headline > HEADLINE_SECONDS:
            self._headline = time.monotonic()
            self.say(headline(summary) + "; " + "; ".join(cell_line(cell) for cell in summary.cells))

    def summary(self, state: str, failure: str) -> None:
        """The last words of the run."""
        took = time.monotonic() - self._began
        if self._last is not None:
            for evaluation in self._last.evals:
                self.say(f"evaluation at version {evaluation.version}: {evaluation.score:.2f}")
        if self._last is not None and self._last.steps:
            rewards = [step.reward for step in self._last.steps if step.reward is not None]
            if rewards:
                ends = max(1, min(3, len(rewards) // 2))
                first, last = sum(rewards[:ends]) / ends, sum(rewards[-ends:]) / ends
                self.say(f"mean reward of the first {ends} steps {first:.2f}, of the last {ends} steps {last:.2f}")
            for cell in self._last.cells:
                self.say(cell_line(cell))
        self.say(f"{self.run.name} {state} after {took:.0f} s; look with: gyre status {self.run.name}")
        if failure:
            print(f"gyre: {failure}", file=sys.stderr, flush=True)
