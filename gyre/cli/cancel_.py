"""`gyre cancel`: end a run cleanly."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command()
def cancel(
    run: Annotated[str | None, typer.Argument(help="Name or path; default: the newest run.")] = None,
    now: Annotated[bool, typer.Option("--now", help="Do not wait for the step in hand.")] = False,
) -> None:
    """End a run cleanly. `gyre resume` can go on with it."""
    from gyre.errors import UserError
    from gyre.launch.control import request_cancel
    from gyre.views.runs import open_run

    opened = open_run(run)
    summary = opened.summary()
    if summary.state not in ("pending", "running"):
        raise UserError(f"{summary.name} is {summary.state} already")
    request_cancel(opened.run, now)
    print(f"{summary.name}: asked to end")
