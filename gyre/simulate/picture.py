"""A picture of the first bursts in each mode: what every cell does, and the waterlevel. One HTML file, no scripts.

Owns the drawing. Invariant: what is drawn is a simulation of the workload, seed 0, and no more: the same scale of time
for all modes, so that lengths compare.
"""

from __future__ import annotations

import html
from collections.abc import Iterator
from pathlib import Path

import msgspec

from gyre.simulate.jobs import Jobs
from gyre.simulate.simulation import Simulation
from gyre.simulate.study import Row, Study, plan_of
from gyre.simulate.text import name_of
from gyre.simulate.workload import Workload

BURSTS = 3
WIDTH, LANE, GAP, LEVEL, LEFT = 1100.0, 16.0, 3.0, 60.0, 70.0
COLOURS = {"rollout": "#9ecae9", "training": "#fdd0a2", "busy": "#e6550d", "switch": "#636363", "level": "#3182bd"}
LEGEND = (
    ("rollout", "serves"),
    ("training", "in training, waits"),
    ("busy", "trains"),
    ("switch", "switches, or takes weights"),
    ("level", "waterlevel: executions dispatched and not ended"),
)


def write_picture(path: Path, workload: Workload, jobs: Jobs, study: Study) -> None:
    """Writes the picture of the study's rows at its first cell count."""
    cells = study.modes[0].cells
    short = msgspec.structs.replace(
        workload,
        steps=min(workload.steps, BURSTS * workload.schedule.steps_per_burst),
        cells=msgspec.structs.replace(workload.cells, count=cells),
    )
    rows = [row for row in study.modes if row.cells == cells]
    runs = [(row, Simulation(short, jobs, plan_of(row)).run()) for row in rows]
    longest = max(run.seconds for _, run in runs)
    parts = [f"<h1>{html.escape(workload.name)}</h1>", f"<p>{_legend()}</p>"]
    for row, run in runs:
        parts += [f"<h2>{_title(row, run)}</h2>", _svg(run, WIDTH / longest)]
    path.write_text(_PAGE.format(title=html.escape(workload.name), body="\n".join(parts)), encoding="utf-8")


def _title(row: Row, run: Simulation) -> str:
    name = html.escape(name_of(row))
    return f"{name}: {run.settings.steps} steps in {run.seconds / 3600.0:.2f} h, whole run {row.hours:.2f} h"


def _legend() -> str:
    return " ".join(f'<span style="background:{COLOURS[key]}">&nbsp;&nbsp;&nbsp;</span> {text}' for key, text in LEGEND)


def _svg(run: Simulation, scale: float) -> str:
    lanes = len(run.cells) * (LANE + GAP)
    height = lanes + LEVEL + 20.0
    shapes = [shape for place, name in enumerate(run.cells) for shape in _lane(run, name, place, scale)]
    shapes += [_level(run, scale, lanes), *_steps(run, scale, height)]
    return f'<svg width="{LEFT + WIDTH + 10:.0f}" height="{height:.0f}">{"".join(shapes)}</svg>'


def _lane(run: Simulation, name: str, place: int, scale: float) -> Iterator[str]:
    cell, top = run.cells[name], place * (LANE + GAP)
    yield f'<text x="0" y="{top + LANE - 4:.1f}">{html.escape(name)}</text>'
    for state, began, ended in [*cell.states, (cell.state, cell.since, run.seconds)]:
        colour = COLOURS.get(state, COLOURS["switch"])
        yield _box(began, min(ended, run.seconds), top, LANE, scale, colour)
    for began, ended in cell.busy:
        yield _box(began, ended, top + 3.0, LANE - 6.0, scale, COLOURS["busy"])


def _box(began: float, ended: float, top: float, height: float, scale: float, colour: str) -> str:
    place = f'x="{LEFT + began * scale:.2f}" y="{top:.1f}" width="{max(0.0, ended - began) * scale:.2f}"'
    return f'<rect {place} height="{height:.1f}" fill="{colour}"/>'


def _level(run: Simulation, scale: float, top: float) -> str:
    most = max(level for _, level in run.levels)
    points, before = [], 0
    for at, level in run.levels:
        x = LEFT + at * scale
        points += [
            f"{x:.1f},{top + LEVEL * (1 - before / most):.1f}",
            f"{x:.1f},{top + LEVEL * (1 - level / most):.1f}",
        ]
        before = level
    line = f'<polyline points="{" ".join(points)}" fill="none" stroke="{COLOURS["level"]}"/>'
    return line + f'<text x="0" y="{top + 12:.1f}">w {most}</text>'


def _steps(run: Simulation, scale: float, height: float) -> Iterator[str]:
    lineage = run.state.reign()
    for step, at in (lineage.t_committed if lineage is not None else {}).items():
        x = LEFT + at * scale
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height - 14:.1f}" stroke="#000" stroke-dasharray="2 3"/>'
        yield f'<text x="{x - 4:.1f}" y="{height - 2:.1f}">{step}</text>'


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>body {{ font: 14px sans-serif; margin: 2em }} h2 {{ font-size: 15px }} svg text {{ font-size: 11px }}</style>
</head><body>
{body}
</body></html>
"""
