"""`gyre simulate`: what a run would take, in each mode, with how many cells."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command()
def simulate(
    what: Annotated[str, typer.Argument(metavar="RECIPE|RUN|WORKLOAD", help="A recipe or workload (TOML), or a run.")],
    modes: Annotated[str, typer.Option("--modes", help="Which, by commas.")] = "elastic,colocate,async",
    cells: Annotated[str, typer.Option("--cells", help="Cell counts, by commas; default: its own.")] = "",
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="How many runs of each.")] = 10,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the workload.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a picture of one run.")] = None,
) -> None:
    """What a run would take, in each mode, with how many cells."""
    from rich.console import Console

    from gyre.simulate.source import find_source, parse_cells, parse_modes
    from gyre.simulate.study import study

    console = Console(stderr=True)
    source = find_source(what, settings or [])
    wanted, counts = parse_modes(modes), parse_cells(cells)
    with console.status(f"simulating {source.workload.name}") as status:
        found = study(source.workload, wanted, counts, source.seeds(seeds), source.jobs_of, status.update)
        if html is not None:
            from gyre.simulate.picture import write_picture

            write_picture(html, source.workload, source.jobs_of(source.workload, 0), found)
    if as_json:
        import msgspec

        print(msgspec.json.encode(found).decode())
        return
    from gyre.simulate.text import render

    out = Console()
    for note in source.notes:
        out.print(note, style="dim")
    out.print(render(found))
