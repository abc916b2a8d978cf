"""The command line: `gyre`.

Owns the list of commands and how errors end. Invariant: nothing heavy is imported before a command runs; a user's
mistake is one line on stderr with exit code 2 (wrong use) or 1 (failed), never a traceback.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import typer
from typer.core import TyperGroup

import gyre

COMMANDS: dict[str, str] = {
    "submit": "Start a run from a recipe.",
    "status": "What a run does, or did.",
    "list": "All runs, newest first.",
    "show": "The executions of a run, one execution, or one turn.",
    "logs": "The output of a run's processes.",
    "cancel": "End a run cleanly.",
    "join": "More cells for a run, from a job of their own.",
    "resume": "Go on with a run that ended or died.",
    "replay": "Train again from the recorded shards, without rollout.",
    "eval": "How well a run's weights, or a model, do on held-out tasks.",
    "simulate": "What a run would take, in each mode, with how many cells.",
    "verify": "Audit a run's ledger.",
    "export": "A step's weights as a Hugging Face folder, or executions as ATIF.",
    "tasks": "Check task folders, prepare their images.",
    "doctor": "Check this machine.",
    "harness": "Install and list harnesses.",
    "engine": "Install engines.",
}


class LazyGroup(TyperGroup):
    """Imports the module of a command only when the command runs. (typer carries a click of its own: hence Any.)"""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"gyre.cli.{cmd_name}_")
        return typer.main.get_command(module.app)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


app = typer.Typer(
    cls=LazyGroup,
    help="Online reinforcement learning of coding agents through unmodified harnesses, on a Slurm cluster.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=False)
def _root(
    version: bool = typer.Option(False, "--version", help="Print the version and exit.", is_eager=True),
) -> None:
    if version:
        print(gyre.__version__)
        raise typer.Exit


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the `gyre` script."""
    from gyre.errors import UserError

    command: Any = typer.main.get_command(app)
    try:
        command.main(args=arguments, prog_name="gyre", standalone_mode=True)
    except UserError as error:
        print(f"gyre: {error}", file=sys.stderr)
        raise SystemExit(error.code) from None


if __name__ == "__main__":
    main()
