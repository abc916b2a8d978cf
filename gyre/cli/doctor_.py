"""`gyre doctor`: does this machine do what a run needs?"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from gyre.launch.findings import Finding

app = typer.Typer(add_completion=False, help="Check this machine.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Check this machine."""


@app.command()
def transfer() -> None:
    """Mooncake: one process publishes, another pulls; bytes, digest and speed."""
    from gyre.transfer.doctor import loopback_check

    report = loopback_check()
    print(
        f"{report.protocol}: pulled {report.nbytes} bytes {report.repeats} times, digests equal; medians: "
        f"{report.transfer:.2f} GB/s, with digest {report.verified:.2f} GB/s, memory copy {report.memcpy:.2f} GB/s"
    )


@app.command()
def template(model: Annotated[Path, typer.Argument(help="Hugging Face folder.")], family: str = "qwen3") -> None:
    """Chat template: the tail rendered alone must be the tail of the whole."""
    from gyre.proxy.verify import verify_template

    report = verify_template(model, family)
    for line in report.lines():
        print(line)
    if not report.ok:
        raise typer.Exit(1)


@app.command()
def sandbox(kind: str = "bubblewrap") -> None:
    """Sandbox: run `true` in one."""
    import asyncio
    import tempfile

    from gyre.executions.sandbox import make_sandbox

    with tempfile.TemporaryDirectory(prefix="gyre-doctor-") as folder:
        asyncio.run(make_sandbox(kind, Path(folder)))
    print(f"{kind}: works")


@app.command()
def slurm() -> None:
    """Slurm: versions, partitions, heterogeneous jobs, backfill, preemption, requeue, accounting."""
    from gyre.launch.slurm_doctor import examine

    _report(examine())


@app.command()
def ledger(
    home: Annotated[Path | None, typer.Argument(help="Folder of run folders; default: GYRE_RUNS.")] = None,
    partition: Annotated[str, typer.Option("--partition", help="Also look from a compute node of this one.")] = "",
) -> None:
    """File system: exclusive creation, rename, room, and how soon an appended line is seen."""
    from gyre.launch.ledger_doctor import examine
    from gyre.ledger.layout import runs_home

    srun = ["srun", f"--partition={partition}", "--nodes=1", "--ntasks=1", "--quiet"] if partition else []
    _report(examine(home or runs_home(), srun))


@app.command()
def engine(
    url: Annotated[str, typer.Argument(help="Where the server answers.")],
    key_file: Annotated[Path | None, typer.Option(help="Its keys, as in RUN/keys.")] = None,
    template: Annotated[str, typer.Option(help="Family of the model's chat template.")] = "qwen3",
) -> None:
    """Engine: ids, log-probabilities at two temperatures, abort, versions, and the tool parser."""
    import asyncio
    import json

    from gyre.errors import UserError
    from gyre.launch.engine_doctor import REPLIES, examine

    if template not in REPLIES:
        raise UserError(f"--template: no family {template!r}; known: {', '.join(REPLIES)}")
    if key_file is not None and not key_file.is_file():
        raise UserError(f"--key-file: {key_file} does not exist")
    keys = json.loads(key_file.read_text()) if key_file is not None else {}

    async def collect() -> list[Finding]:
        return [finding async for finding in examine(url, keys, template)]

    _report(asyncio.run(collect()))


def _report(findings: Iterable[Finding]) -> None:
    """A line each, as it is found; exit code 1 when there was a failure."""
    from gyre.launch.findings import failed

    told = []
    for finding in findings:
        print(finding.line(), flush=True)
        told.append(finding)
    if failed(told):
        raise typer.Exit(1)
