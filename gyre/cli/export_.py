"""`gyre export`: a step's weights as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command()
def export(
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="Folder to make.")],
    run: Annotated[str | None, typer.Argument(help="Name or path; default: the newest run.")] = None,
    step: Annotated[int, typer.Option("--step", help="Step whose checkpoint is kept; default: the newest.")] = 0,
) -> None:
    """A step's weights as a Hugging Face folder that transformers loads."""
    from gyre.errors import UserError
    from gyre.ledger.checkpoints import newest_complete, verify
    from gyre.ledger.job import read_job
    from gyre.ledger.layout import find_run

    found = find_run(run)
    if to.exists():
        raise UserError(f"--to {to} exists already: name another folder")
    if step:
        path = found.checkpoint_path(step)
        problems = verify(path) if path.exists() else [f"no checkpoint of step {step} is kept in {found.checkpoints}"]
        if problems:
            raise UserError(problems[0])
    else:
        info, passed = newest_complete(found.checkpoints)
        for line in passed:
            print(line)
        if info is None:
            raise UserError(f"{found.name} has no complete checkpoint yet")
        path = info.path
    from gyre.training.export import export_checkpoint

    export_checkpoint(path, Path(read_job(found).model), to)
    print(f"{path.name} -> {to}")
