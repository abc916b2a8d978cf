"""`gyre tasks check`: are these task folders fit for training?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, help="Check task folders.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Check task folders."""


@app.command()
def check(
    path: Annotated[Path, typer.Argument(help="Folder of task folders, or one task folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
) -> None:
    """Each task: readable, its solution earns 1, an untouched workspace 0."""
    import asyncio

    from gyre.executions.check import check_tasks

    results = asyncio.run(check_tasks(path))
    if as_json:
        import msgspec

        print(msgspec.json.encode(results).decode())
    else:
        for result in results:
            print(result.line())
    if any(result.faults for result in results):
        raise typer.Exit(1)
