"""`gyre engine`: inference engines in environments of their own."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(add_completion=False, help="Install engines.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Install engines."""


@app.command()
def install(
    engine: Annotated[str, typer.Argument(metavar="sglang", help="The engine.")],
) -> None:
    """SGLang for CPU, from a pinned list, in the cache folder ($GYRE_CACHE, or ~/.cache/gyre)."""
    from gyre.engines.sglang.install import install as build
    from gyre.errors import UserError

    if engine != "sglang":
        raise UserError(f"{engine!r} is not an engine that can be installed; known: sglang")
    print(f"sglang: {build(lambda line: print(line, flush=True))}")
