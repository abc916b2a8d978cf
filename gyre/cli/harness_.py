"""`gyre harness`: the agent programs that gyre can run unmodified."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(add_completion=False, help="Install and list harnesses.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Install and list harnesses."""


@app.command()
def install(
    harness: Annotated[str, typer.Argument(metavar="NAME[@VERSION]", help="Without a version: the tested one.")],
) -> None:
    """Fetch a harness from npm or PyPI into the cache folder ($GYRE_CACHE, or ~/.cache/gyre)."""
    from gyre.executions.harnesses.install import install as fetch

    print(f"{harness}: {fetch(harness)}")


@app.command("list")
def list_() -> None:
    """Which harnesses there are, what was tested, what is installed."""
    from gyre.executions.harnesses.install import PACKAGES, installed

    print("shell: comes with gyre")
    for name, package in sorted(PACKAGES.items()):
        here = ", ".join(installed(name)) or "none"
        print(f"{name}: tested {', '.join(package.tested)}; installed {here} ({package.index}: {package.name})")
