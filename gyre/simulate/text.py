"""A study for people: one table a cell count, and the notes that a reader needs. No arithmetic beyond rounding."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table

from gyre.simulate.study import WORK_TOLERANCE, Row, Study


def render(study: Study) -> Group:
    parts: list[RenderableType] = []
    for cells, least in study.bounds.items():
        rows = [row for row in study.modes if row.cells == int(cells)]
        parts.append(_table(study, rows, cells, least))
        parts += [note for row in rows if (note := _note(row))]
    return Group(*parts)


def name_of(row: Row) -> str:
    """Async is named by its split, training + rollout."""
    if row.mode != "async":
        return row.mode
    return f"async {row.training_cells}+{row.cells - row.training_cells}{'' if row.streaming else ' batches'}"


def unit_of(hours: float) -> tuple[str, float]:
    """The unit that shows such a time best, and how many of it an hour has."""
    for name, per_hour in (("hours", 1.0), ("minutes", 60.0)):
        if hours * per_hour >= 1.0:
            return name, per_hour
    return "seconds", 3600.0


def _table(study: Study, rows: list[Row], cells: str, least: float) -> Table:
    unit, per_hour = unit_of(least)
    table = Table(
        title=f"{study.workload}: {study.steps} steps, {cells} cells, {study.seeds} seed{'s'[: study.seeds > 1]};"
        f" bound {least * per_hour:.2f} {unit}",
        title_justify="left",
        box=None,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column("mode", no_wrap=True)
    for head in (
        unit,
        "min",
        "max",
        "elastic\nfaster",
        "over\nbound",
        "idle",
        "stale\nmax",
        "stale\nmean",
        "work\nlost",
    ):
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            name_of(row),
            *(f"{hours * per_hour:.2f}" for hours in (row.hours, row.hours_min, row.hours_max)),
            f"{row.speedup:.3f}x",
            f"{row.over_bound:.3f}x",
            f"{row.idle_share:.0%}",
            f"{row.staleness_max}",
            f"{row.staleness_mean:.2f}",
            f"{row.lost_work_share:.1%}",
        )
    return table


def _note(row: Row) -> str:
    if abs(row.work_difference) <= WORK_TOLERANCE:
        return ""
    return f"{name_of(row)}: trained {row.work_difference:+.1%} work against elastic: its time does not compare."
