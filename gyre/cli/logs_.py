"""`gyre logs`: the output of a run's processes."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(add_completion=False)

FOLLOW_SECONDS = 0.5


@app.command()
def logs(
    run: Annotated[str | None, typer.Argument(help="Name or path; default: the newest run.")] = None,
    process: Annotated[str, typer.Argument(help="Process, such as worker-0; default: list them.")] = "",
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on as it grows.")] = False,
) -> None:
    """The output of a run's processes."""
    import time

    from gyre.errors import UserError
    from gyre.ledger.job import read_job
    from gyre.ledger.layout import find_run

    found = find_run(run)
    folder = found.log_dir(read_job(found).attempt)
    files = {path.stem: path for path in [*sorted(found.launch.glob("job-*.log")), *sorted(folder.glob("*.log"))]}
    if not process:
        for name, path in files.items():
            print(f"{name}  {path.stat().st_size} bytes  {path}")
        return
    if process not in files:
        raise UserError(f"no log of {process!r} in {folder}; there are: {', '.join(files) or 'none'}")
    with open(files[process], errors="replace") as log:
        while True:
            while chunk := log.read(1 << 16):
                print(chunk, end="", flush=True)
            if not follow:
                return
            time.sleep(FOLLOW_SECONDS)
