"""`gyre tasks check` and `gyre tasks prepare`: are these task folders fit for training, and are their images ready?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from gyre.executions.images.store import Images

app = typer.Typer(add_completion=False, help="Check task folders, prepare their images.", no_args_is_help=True)

TaskPath = Annotated[Path, typer.Argument(help="Folder of task folders, or one task folder.")]
ImageFolder = Annotated[
    Path | None,
    typer.Option("--images", help="Folder of images, as sandbox.images; default: the host's system stands in."),
]
AsJson = Annotated[bool, typer.Option("--json", help="For scripts.")]


@app.callback()
def _group() -> None:
    """Check task folders, prepare their images."""


@app.command()
def check(
    path: TaskPath,
    images: ImageFolder = None,
    kind: Annotated[str, typer.Option("--kind", help="Kind of sandbox, as sandbox.kind.")] = "bubblewrap",
    parallel: Annotated[int, typer.Option("--parallel", min=1, help="Tasks at a time.")] = 2,
    as_json: AsJson = False,
) -> None:
    """Each task: readable, its image available, its solution earns 1, an untouched workspace 0."""
    import asyncio
    import tempfile

    from gyre.executions.check import TaskCheck, check_tasks
    from gyre.executions.sandbox import make_sandbox

    def say(task: TaskCheck) -> None:
        if not as_json:
            verdict = "; ".join(task.problems) or "ok"
            print(f"{task.name}: {verdict} ({task.solve_seconds + task.grade_seconds:.2f} s)", flush=True)

    async def run(folder: Path) -> list[TaskCheck]:
        sandbox = await make_sandbox(kind, folder)
        return await check_tasks(path, sandbox, folder, parallel=parallel, done=say, images=_images(images))

    with tempfile.TemporaryDirectory(prefix="gyre-tasks-") as folder:
        results = asyncio.run(run(Path(folder)))
    bad = sum(1 for task in results if not task.good)
    _end(as_json, results, bad, f"{len(results) - bad} of {len(results)} tasks are good")


@app.command()
def prepare(
    path: TaskPath,
    images: ImageFolder = None,
    parallel: Annotated[int, typer.Option("--parallel", min=1, help="Images at a time.")] = 4,
    as_json: AsJson = False,
) -> None:
    """Unpack the images of these tasks into the cache ($GYRE_CACHE, or ~/.cache/gyre), before a run needs them."""
    from gyre.executions.images.prepare import Prepared, prepare_images

    def say(prepared: Prepared) -> None:
        if not as_json:
            name = Path(prepared.image).name or ("the host's system" if not prepared.problem else prepared.tasks[0])
            state = "unpacked now" if prepared.built else "ready"
            count = f"{len(prepared.tasks)} task{'s' if len(prepared.tasks) > 1 else ''}"
            print(f"{name}: {prepared.problem or f'{state} ({prepared.seconds:.2f} s)'}, {count}", flush=True)

    results = prepare_images(path, _images(images), parallel=parallel, done=say)
    bad = sum(1 for prepared in results if prepared.problem)
    ready = len(results) - bad
    _end(as_json, results, bad, f"{ready} of {len(results)} images are ready")


def _images(folder: Path | None) -> Images:
    from gyre.errors import UserError
    from gyre.executions.images.store import Images

    if folder is not None and not folder.is_dir():
        raise UserError(f"--images {folder}: no such folder")
    return Images(folder)


def _end(as_json: bool, results: object, bad: int, summary: str) -> None:
    if as_json:
        import msgspec

        print(msgspec.json.encode(results).decode())
    else:
        print(summary)
    if bad:
        raise typer.Exit(1)
