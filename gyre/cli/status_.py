"""`gyre status`: what a run does, or did."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(add_completion=False)

WATCH_SECONDS = 1.0


@app.command()
def status(
    run: Annotated[str | None, typer.Argument(help="Name or path; default: the newest run.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Keep showing it until it ends.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
) -> None:
    """What a run does, or did."""
    from gyre.views.runs import open_run

    opened = open_run(run)
    if as_json:
        import msgspec

        print(msgspec.json.encode(opened.summary()).decode())
        return
    from rich.console import Console

    from gyre.views.text import render

    console = Console()
    if not watch:
        console.print(render(opened.summary()))
        return
    import time

    from rich.live import Live

    with Live(console=console, refresh_per_second=4) as live:
        while True:
            summary = opened.summary()
            live.update(render(summary, last=20))
            if summary.state not in ("pending", "running"):
                return
            time.sleep(WATCH_SECONDS)
            opened.view.poll()
