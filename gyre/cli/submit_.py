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
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would start.")] = False,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the recipe.")
    ] = None,
    name: Annotated[str, typer.Option("--name", help="Name of the run; default: the recipe's, numbered.")] = "",
) -> None:
    """Start a run from a recipe: a Slurm job, or with --local all of it here."""
    import time

    from gyre.launch.submit import create_run, free_name, plan
    from gyre.ledger.layout import runs_home

    planned = plan(recipe, settings or [], local=local)
    if not local:
        from gyre.launch.slurm_submit import dry_run as script, submit_new

        # all that can be refused is refused before there is a folder
        text = script(planned.recipe, runs_home() / (name or free_name(planned.recipe.name)))
        if dry_run:
            print(text, end="")
            return
        run = create_run(planned, "slurm", time.time(), print, name)
        job_id = submit_new(run, planned.recipe)
        print(f"run {run.name} in {run.path}, job {job_id}; look with: gyre status {run.name}")
        return
    if dry_run:
        from gyre.recipe.load import dump_toml
        from gyre.recipe.places import describe_engines

        print(dump_toml(planned.recipe), end="")
        print(f"# {len(planned.tasks)} tasks, {len(planned.eval_tasks)} held out")
        print(f"# would start: supervisor, {', '.join(planned.processes)}")
        for line in describe_engines(planned.recipe):
            print(f"# {line}")
        return
    from gyre.launch.foreground import run_in_foreground

    run = create_run(planned, "local", time.time(), print, name)
    raise typer.Exit(run_in_foreground(run, planned.recipe))
