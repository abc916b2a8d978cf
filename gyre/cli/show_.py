"""`gyre show`: the executions of a run, the tree of one, or the text of one turn."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command()
def show(
    run: Annotated[str | None, typer.Argument(help="Name or path; default: the newest run.")] = None,
    execution: Annotated[str, typer.Argument(help="Execution, such as g00003-01; default: list them.")] = "",
    turn: Annotated[int, typer.Argument(help="Turn of the execution: its text; default: the tree of all.")] = -1,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
    limit: Annotated[int, typer.Option("--limit", help="Executions to list, the newest; 0 lists all.")] = 50,
) -> None:
    """The executions of a run, one execution, or one turn."""
    from gyre.views.runs import open_run
    from gyre.views.show import find_execution, list_executions
    from gyre.views.show_text import list_text, tree_text, turn_text

    opened = open_run(run)
    if not execution:
        rows = list_executions(opened.state, limit)
        found: object = rows
        text = list_text(rows)
    else:
        view = find_execution(opened, execution, turn)
        found = view
        text = tree_text(view) if turn < 0 else turn_text(view)
    if as_json:
        import msgspec

        text = msgspec.json.encode(found).decode()
    print(text)
