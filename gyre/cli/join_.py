"""`gyre join`: more cells for a run, from a job of their own."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command()
def join(
    run: Annotated[str | None, typer.Argument(help="Name or path; default: the newest run.")] = None,
    cells: Annotated[int, typer.Option("--cells", min=1, help="How many.")] = 1,
    partition: Annotated[str, typer.Option("--partition", help="Default: that of the run's own cells.")] = "",
    time: Annotated[str, typer.Option("--time", help="Time limit; default: that of the run's own cells.")] = "",
) -> None:
    """Submit a job whose cells join a run as satellites. It may be preempted at any time, and leaves with the run."""
    from gyre.errors import UserError
    from gyre.launch.slurm_join import join as submit_guests
    from gyre.launch.slurm_queue import SlurmSilent
    from gyre.launch.slurm_status import ask_slurm, joined
    from gyre.views.runs import open_run

    opened = open_run(run)
    if opened.job.launcher != "slurm":
        raise UserError(f"{opened.run.name} runs on one machine: only runs under Slurm can be joined")
    summary, _ = joined(opened, *ask_slurm([opened.job]))
    if summary.state not in ("pending", "running"):
        raise UserError(f"{summary.name} is {summary.state}: there is nothing to join")
    try:
        job_id, names = submit_guests(opened.run, opened.recipe, cells, partition, time)
    except SlurmSilent as error:
        raise UserError(str(error), code=1) from None
    print(f"{summary.name}: {', '.join(names)} will join from job {job_id}")
