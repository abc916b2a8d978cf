"""`gyre eval`: how well a run's weights, or a model, do on held-out tasks. Nothing is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command()
def evaluate(
    target: Annotated[str, typer.Argument(metavar="RUN|MODEL", help="A run's name or path, or a Hugging Face folder.")],
    tasks: Annotated[Path, typer.Option("--tasks", help="Folder of task folders.")],
    local: Annotated[bool, typer.Option("--local", help="Run everything on this machine, in the foreground.")] = False,
    recipe: Annotated[
        Path | None, typer.Option("--recipe", help="How its agents work; default: the run's own recipe.")
    ] = None,
    step: Annotated[int, typer.Option("--step", help="Step whose checkpoint is kept; default: the newest.")] = 0,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Executions of each task.")] = 1,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the recipe.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="With --local: only the results, for scripts.")] = False,
) -> None:
    """Run held-out tasks without training: pass rate with an interval, and each task's part.

    Without --local it is a Slurm job; `gyre status` of the run that is printed then has the score.
    """
    import sys
    import time

    from gyre.launch.evaluate import find_subject, plan_evaluation
    from gyre.launch.submit import create_run

    def say(text: str) -> None:
        print(text, file=sys.stderr if as_json else sys.stdout, flush=True)

    subject = find_subject(target, recipe, step, say)
    planned = plan_evaluation(subject, tasks, samples, settings or [], local)
    run = create_run(planned, "local" if local else "slurm", time.time(), say)
    if not local:
        from gyre.launch.slurm_submit import submit_new

        say(f"evaluation {run.name} in job {submit_new(run, planned.recipe)}; look with: gyre status {run.name}")
        return
    from gyre.launch.foreground import run_in_foreground
    from gyre.views.evaluation import evaluate as results, evaluation_lines
    from gyre.views.runs import read_run

    code = run_in_foreground(run, planned.recipe, sys.stderr if as_json else sys.stdout)
    found = results(read_run(run).state)
    if as_json:
        import msgspec

        print(msgspec.json.encode(found).decode())
    else:
        for line in evaluation_lines(found):
            print(line)
    raise typer.Exit(code)
