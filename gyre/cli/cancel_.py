"""`gyre cancel`: end a run cleanly."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(add_completion=False)

CLEAN_SECONDS = 20.0
"""With --now, for the processes of a job to end in order before Slurm ends them."""


@app.command()
def cancel(
    run: Annotated[str | None, typer.Argument(help="Name or path; default: the newest run.")] = None,
    now: Annotated[bool, typer.Option("--now", help="Do not wait for the step in hand.")] = False,
) -> None:
    """End a run cleanly. `gyre resume` can go on with it."""
    import time

    from gyre.errors import UserError
    from gyre.launch import slurm_queue
    from gyre.launch.control import request_cancel
    from gyre.launch.slurm_status import ask_slurm, joined
    from gyre.views.runs import open_run

    opened = open_run(run)
    summary, slurm = joined(opened, *ask_slurm([opened.job]))
    if summary.state not in ("pending", "running"):
        raise UserError(f"{summary.name} is {summary.state} already")
    request_cancel(opened.run, now)
    if slurm is None or (summary.state == "running" and not now):
        print(f"{summary.name}: asked to end")
        return
    try:
        if summary.state == "running":
            deadline = time.monotonic() + CLEAN_SECONDS
            while opened.state.ended is None and time.monotonic() < deadline:
                time.sleep(0.5)
                opened.view.poll()
        slurm_queue.cancel(slurm.job_id)
    except slurm_queue.SlurmSilent as error:
        raise UserError(f"job {slurm.job_id} is not cancelled: {error}", code=1) from None
    print(f"{summary.name}: job {slurm.job_id} is cancelled")
