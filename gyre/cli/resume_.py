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
    """Go on with a run that ended or died: in a new Slurm job, or for a local run in the foreground."""
    from gyre.errors import UserError
    from gyre.launch.resume import prepare_resume
    from gyre.launch.slurm_status import ask_slurm, joined
    from gyre.views.runs import open_run

    opened = open_run(run)
    summary, slurm = joined(opened, *ask_slurm([opened.job]))
    if slurm is not None and summary.state in ("pending", "running"):
        raise UserError(f"{summary.name} is {summary.state} ({summary.reason or f'job {slurm.job_id}'})")
    recipe = prepare_resume(opened.run, summary.state, settings or [])
    if opened.job.launcher == "slurm":
        from gyre.launch.slurm_submit import submit_run

        print(f"{summary.name} goes on in job {submit_run(opened.run, recipe)}")
        return
    from gyre.launch.foreground import run_in_foreground

    raise typer.Exit(run_in_foreground(opened.run, recipe))
