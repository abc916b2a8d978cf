"""`gyre submit`: check a recipe, freeze it in a run folder, and start it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command()
def submit(
    recipe: Annotated[Path, typer.Argument(help="Recipe (TOML).")],
    local: Annotated[bool, typer.Option("--local", help="Run everything on this machine, in the foreground.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved recipe and what would start.")] = False,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the recipe.")
    ] = None,
    name: Annotated[str, typer.Option("--name", help="Name of the run; default: the recipe's, numbered.")] = "",
) -> None:
    """Start a run from a recipe."""
    import time

    from gyre.errors import UserError
    from gyre.launch.submit import create_run, plan

    planned = plan(recipe, settings or [], local=local)
    if dry_run:
        from gyre.recipe.load import dump_toml

        print(dump_toml(planned.recipe), end="")
        print(f"# {len(planned.tasks)} tasks, {len(planned.eval_tasks)} held out")
        print(f"# would start: supervisor, {', '.join(planned.processes)}")
        return
    if not local:
        raise UserError("only --local runs are launched by this version; Slurm comes with issue 3")
    from gyre.launch.foreground import run_in_foreground

    run = create_run(planned, "local", time.time(), print, name)
    raise typer.Exit(run_in_foreground(run, planned.recipe))
