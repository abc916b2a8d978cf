"""`gyre resume`: go on with a run that ended or died."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command()
def resume(
    run: Annotated[str | None, typer.Argument(help="Name or path; default: the newest run.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the recipe.")
    ] = None,
) -> None:
    """Go on with a run that ended or died, in the foreground."""
    from gyre.launch.foreground import run_in_foreground
    from gyre.launch.resume import prepare_resume
    from gyre.views.runs import open_run

    opened = open_run(run)
    recipe = prepare_resume(opened.run, opened.summary().state, settings or [])
    raise typer.Exit(run_in_foreground(opened.run, recipe))
