"""`gyre list`: all runs, newest first."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)

PIPE_WIDTH = 160


@app.command(name="list")
def list_runs(as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False) -> None:
    """All runs, newest first."""
    from gyre.launch.slurm_status import ask_slurm, joined
    from gyre.ledger.layout import list_runs as folders, runs_home
    from gyre.views.runs import read_run

    opened = [read_run(run) for run in folders()]
    known, problem = ask_slurm(run.job for run in opened)
    summaries = [joined(run, known, problem)[0] for run in opened]
    if as_json:
        import msgspec

        rows = [
            {
                "name": s.name,
                "path": s.path,
                "state": s.state,
                "reason": s.reason,
                "step": len(s.steps),
                "steps": s.steps_planned,
                "reward": s.steps[-1].reward if s.steps else None,
                "started": s.started,
            }
            for s in summaries
        ]
        print(msgspec.json.encode(rows).decode())
        return
    if not summaries:
        print(f"no runs in {runs_home()}")
        return
    import datetime

    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("name", "state", "step", "reward", "started", "path"):
        table.add_column(column)
    for s in summaries:
        reward = s.steps[-1].reward if s.steps else None
        started = datetime.datetime.fromtimestamp(s.started).strftime("%Y-%m-%d %H:%M") if s.started else ""
        table.add_row(
            s.name,
            s.state,
            f"{len(s.steps)}/{s.steps_planned}",
            "-" if reward is None else f"{reward:.2f}",
            started,
            s.path,
        )
    Console(width=None if sys.stdout.isatty() else PIPE_WIDTH).print(table)
