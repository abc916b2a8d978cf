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
    import tempfile

    from gyre.executions.check import TaskCheck, check_tasks
    from gyre.executions.sandbox import make_sandbox

    def say(task: TaskCheck) -> None:
        if not as_json:
            verdict = "; ".join(task.problems) or "ok"
            print(f"{task.name}: {verdict} ({task.solve_seconds + task.grade_seconds:.2f} s)", flush=True)

    async def run(folder: Path) -> list[TaskCheck]:
        return await check_tasks(path, await make_sandbox("bubblewrap", folder), folder, done=say)

    with tempfile.TemporaryDirectory(prefix="gyre-tasks-") as folder:
        results = asyncio.run(run(Path(folder)))
    bad = sum(1 for task in results if not task.good)
    if as_json:
        import msgspec

        print(msgspec.json.encode(results).decode())
    else:
        print(f"{len(results) - bad} of {len(results)} tasks are good")
    if bad:
        raise typer.Exit(1)
