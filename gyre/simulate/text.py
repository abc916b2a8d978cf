"""A study for people: one table a cell count, and the notes that a reader needs. No arithmetic beyond rounding."""

from __future__ import annotations

from rich import box
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
    if row.mode != "async":
        return row.mode
    return f"async {row.training_cells}+{row.cells - row.training_cells}{'' if row.streaming else ' batches'}"


def _table(study: Study, rows: list[Row], cells: str, least: float) -> Table:
    table = Table(
        title=f"{study.workload}: {study.steps} steps, {cells} cells, {study.seeds} seeds; bound {least:.2f} h",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1),
    )
    table.add_column("mode")
    for head in (
        "hours",
        "min",
        "max",
        "elastic\nfaster",
        "over\nbound",
        "idle",
        "stale\nmax",
        "mean",
        "lost to\ntimeout",
    ):
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(
            name_of(row),
            f"{row.hours:.2f}",
            f"{row.hours_min:.2f}",
            f"{row.hours_max:.2f}",
            f"{row.speedup:.3f}x",
            f"{row.over_bound:.3f}x",
            f"{row.idle_share:.0%}",
            f"{row.staleness_max}",
            f"{row.staleness_mean:.2f}",
            f"{row.lost_work_share:.2%}",
        )
    return table


def _note(row: Row) -> str:
    if abs(row.work_difference) <= WORK_TOLERANCE:
        return ""
    return f"{name_of(row)}: trained {row.work_difference:+.1%} work against elastic: its time does not compare."
