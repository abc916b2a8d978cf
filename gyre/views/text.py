"""Text of a run's summary: the tables that `gyre status` prints and the panel that `gyre submit` keeps alive.

Invariant: it shows what `Summary` holds and computes nothing.
"""

from __future__ import annotations

import time

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gyre.views.summary import CellSummary, StepSummary, Summary

STEP_COLUMNS = (
    "step",
    "version",
    "reward",
    "seconds",
    "stale",
    "sampled",
    "trained",
    "dropped",
    "norm",
    "clip",
)


def headline(summary: Summary) -> str:
    """One line: where the run is."""
    text = (
        f"{summary.name}: {summary.state}, step {len(summary.steps)}/{summary.steps_planned}, burst {summary.burst}, "
        f"waterlevel {summary.waterlevel}, {summary.executions_graded} graded, "
        f"{summary.tokens_per_second:.0f} tokens/s"
    )
    return text + (f" ({summary.reason})" if summary.reason else "")


def step_line(step: StepSummary, planned: int) -> str:
    reward = "-" if step.reward is None else f"{step.reward:.2f}"
    return (
        f"step {step.step}/{planned}  version {step.version}  reward {reward}  {step.seconds:.1f} s  "
        f"tokens {step.tokens_sampled} sampled, {step.tokens_trained} trained  staleness {step.staleness}  "
        f"grad norm {step.gradient_norm:.3g}"
    ) + (f"  ALARM {step.alarm}" if step.alarm else "")


def cell_line(cell: CellSummary) -> str:
    version = f", serves {cell.weight_version}" if cell.weight_version else ""
    return f"{cell.name} ({cell.kind}): {cell.state}{version}, {len(cell.switches)} switches"


def step_table(summary: Summary, last: int | None = None) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in STEP_COLUMNS:
        table.add_column(column, justify="right")
    for step in summary.steps[-last:] if last else summary.steps:
        table.add_row(
            str(step.step),
            str(step.version),
            "-" if step.reward is None else f"{step.reward:.3f}",
            f"{step.seconds:.1f}",
            str(step.staleness),
            str(step.tokens_sampled),
            str(step.tokens_trained),
            str(step.tokens_dropped),
            f"{step.gradient_norm:.3g}",
            f"{step.clip_fraction:.2f}",
        )
    return table


def cell_table(summary: Summary, now: float) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("cell", "kind", "state", "for", "serves", "switches", "last switch"):
        table.add_column(column)
    for cell in summary.cells:
        last = cell.switches[-1] if cell.switches else None
        phases = " ".join(f"{name} {seconds:.2f}s" for name, seconds in last.phases.items()) if last else ""
        table.add_row(
            cell.name,
            cell.kind,
            cell.state,
            f"{max(0.0, now - cell.since):.0f} s" if cell.since else "",
            cell.weight_version.partition("-")[0],
            str(len(cell.switches)),
            f"to {last.to}: {phases}" if last else "",
        )
    return table


def render(summary: Summary, last: int | None = None, now: float | None = None) -> RenderableType:
    """Everything, for a terminal."""
    parts: list[RenderableType] = [
        Text(headline(summary), no_wrap=True, overflow="fold"),
        Text(summary.path, style="dim"),
        Text(""),
        step_table(summary, last),
    ]
    if summary.evals:
        scores = ", ".join(f"{e.score:.2f} at version {e.version}" for e in summary.evals)
        parts += [Text(""), Text(f"evaluation on held-out tasks: {scores}")]
    if others := {reason: count for reason, count in summary.attempts_ended.items() if reason != "finished"}:
        counts = ", ".join(f"{count} {reason}" for reason, count in others.items())
        excluded = f" ({summary.executions_excluded} executions excluded)" if summary.executions_excluded else ""
        parts += [Text(""), Text(f"attempts that did not just finish: {counts}{excluded}")]
    for task, reason in sorted(summary.set_aside.items()):
        parts.append(Text(f"task {task} is set aside: {reason}", style="yellow"))
    if summary.cells:
        parts += [Text(""), cell_table(summary, time.time() if now is None else now)]
    return Group(*parts)
