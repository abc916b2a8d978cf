"""`gyre replay`: train again from the recorded shards, without rollout."""

from __future__ import annotations

import os
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command()
def replay(
    run: Annotated[str | None, typer.Argument(help="Name or path; default: the newest run.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="What another setting would have trained.")
    ] = None,
    steps: Annotated[str, typer.Option("--steps", metavar="A:B", help="Steps A to B; default: all.")] = "",
    train: Annotated[bool, typer.Option("--train/--no-train", help="Train, or only pack.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
) -> None:
    """Train again from the recorded shards: equal micro-steps, bit-equal weights. Exit code 1 when they differ."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the ranks' setting: sums are made in the same order
    from gyre.processes.replay import replay as run_replay
    from gyre.recipe.load import load_recipe
    from gyre.views.runs import open_run

    opened = open_run(run)
    recipe = load_recipe(opened.run.recipe, settings or [], folders=False)
    first, last = parse_steps(steps)
    rows = []
    for row in run_replay(opened.run, recipe, opened.job, opened.state, first, last, train):
        rows.append(row)
        if not as_json:
            weights = {True: "weights bit-equal", False: "weights DIFFER", None: "weights not compared"}[
                row.weights_equal
            ]
            if row.gradient_difference is not None:
                weights = f"its gradient differs by {row.gradient_difference:.1e} of the norm"
            print(
                f"step {row.step}: {row.microsteps} micro-steps {'equal' if row.microsteps_equal else 'differ'}, "
                f"{row.tokens_trained} tokens trained (the run: {row.tokens_trained_by_run}), {weights}, "
                f"grad norm {row.gradient_norm:.6g}"
                + (f" (the run: {row.gradient_norm_by_run:.6g})" if row.gradient_norm_by_run is not None else ""),
                flush=True,
            )
    if as_json:
        import msgspec

        print(msgspec.json.encode(rows).decode())
    broken = any(row.weights_equal is False or not row.microsteps_equal for row in rows)
    if broken and not settings:
        raise typer.Exit(1)


def parse_steps(text: str) -> tuple[int, int]:
    """ "3:5" -> (3, 5); "" -> (1, 0), which is all. Raises UserError."""
    from gyre.errors import UserError

    if not text:
        return 1, 0
    first, colon, last = text.partition(":")
    if not first.isdigit() or (last and not last.isdigit()):
        raise UserError(f"--steps {text}: give A:B, such as 3:5")
    return int(first), int(last) if last else (0 if colon else int(first))
