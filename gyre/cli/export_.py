"""`gyre export`: a step's weights as a Hugging Face folder, or recorded executions as ATIF documents."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


class Format(StrEnum):
    """What can be written."""

    HUGGING_FACE = "hf"
    ATIF = "atif"


@app.command()
def export(
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="Folder to make.")],
    run: Annotated[str | None, typer.Argument(help="Name or path; default: the newest run.")] = None,
    step: Annotated[int, typer.Option("--step", help="Step whose checkpoint is kept; default: the newest.")] = 0,
    form: Annotated[Format, typer.Option("--format", help="hf: weights; atif: executions.")] = Format.HUGGING_FACE,
    execution: Annotated[str, typer.Option("--execution", help="atif: this one alone; default: all.")] = "",
    prompt_ids: Annotated[bool, typer.Option("--prompt-ids", help="atif: each call's whole prompt as ids.")] = False,
) -> None:
    """A step's weights as a Hugging Face folder that transformers loads, or recorded executions as ATIF 1.8."""
    if form is Format.ATIF:
        from gyre.views.atif_export import export_executions
        from gyre.views.runs import open_run

        documents, executions = export_executions(open_run(run), to, execution, prompt_ids)
        print(f"{documents} documents of {executions} executions -> {to}")
        return
    from gyre.errors import UserError
    from gyre.ledger.checkpoints import chosen
    from gyre.views.runs import open_run

    opened = open_run(run)
    if to.exists():
        raise UserError(f"--to {to} exists already: name another folder")
    info, passed = chosen(opened.run.checkpoints, step, opened.state.openings())
    for line in passed:
        print(line)
    if info is None:
        raise UserError(f"{opened.run.name} has no complete checkpoint yet")
    from gyre.training.export import export_checkpoint

    export_checkpoint(info.path, Path(opened.job.model), to)
    print(f"{info.path.name} -> {to}")
