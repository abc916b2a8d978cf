"""`gyre show`: the executions of a run, one execution, or one turn."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command()
def show(
    run: Annotated[str | None, typer.Argument(help="Name or path; default: the newest run.")] = None,
    execution: Annotated[str, typer.Argument(help="Execution, such as g00003-01; default: list them.")] = "",
    turn: Annotated[int, typer.Argument(help="Turn of the execution; default: all.")] = -1,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
    limit: Annotated[int, typer.Option("--limit", help="Executions to list, the newest; 0 lists all.")] = 50,
) -> None:
    """The executions of a run, one execution, or one turn."""
    from gyre.views.runs import open_run
    from gyre.views.show import execution_text, find_execution, list_executions, list_text

    opened = open_run(run)
    if not execution:
        rows = list_executions(opened.state, limit)
        found: object = rows
    else:
        found = find_execution(opened, execution, turn)
    if as_json:
        import msgspec

        print(msgspec.json.encode(found).decode())
        return
    print(list_text(rows) if not execution else execution_text(found))  # type: ignore[arg-type]
