"""`gyre status`: what a run does, or did."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)

WATCH_SECONDS = 1.0
PIPE_WIDTH = 160
LAST_STEPS = 100
"""Steps in the table; --json has them all."""
ASK_SECONDS = 5.0
"""Between questions to Slurm, which serves everybody."""


@app.command()
def status(
    run: Annotated[str | None, typer.Argument(help="Name or path; default: the newest run.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Keep showing it until it ends.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
) -> None:
    """What a run does, or did; under Slurm joined with what Slurm says of its job."""
    from gyre.launch.slurm_status import ask_slurm, joined
    from gyre.views.runs import open_run

    opened = open_run(run)
    summary, slurm = joined(opened, *ask_slurm([opened.job]))
    if as_json:
        import msgspec

        more = {"slurm": msgspec.to_builtins(slurm)} if slurm is not None else {}
        print(msgspec.json.encode({**msgspec.to_builtins(summary), **more}).decode())
        return
    from rich.console import Console

    from gyre.launch.slurm_status import job_line
    from gyre.views.text import render

    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    if not watch:
        console.print(render(summary, last=LAST_STEPS))
        if slurm is not None:
            console.print(f"\n{job_line(slurm)}", highlight=False)
        return
    import time

    from rich.live import Live

    from gyre.ledger.job import read_job

    with Live(console=console, refresh_per_second=4) as live:
        while True:
            summary, _ = joined(opened, *ask_slurm([read_job(opened.run)]))
            live.update(render(summary, last=20))
            if summary.state not in ("pending", "running"):
                return
            time.sleep(WATCH_SECONDS if slurm is None else ASK_SECONDS)
            opened.view.poll()
