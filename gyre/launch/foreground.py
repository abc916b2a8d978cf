"""A local run in the foreground: the supervisor, what it shows, and Ctrl-C.

Owns the signals of `gyre submit --local` and `gyre resume`. Invariant: the first Ctrl-C cancels the run cleanly, the
second ends it at once; either way no process and no port is left.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import TextIO

from gyre.errors import UserError
from gyre.launch.control import request_cancel
from gyre.launch.local import Supervisor
from gyre.ledger.layout import RunFolder
from gyre.recipe.schema import Recipe
from gyre.views.progress import Progress


def run_in_foreground(run: RunFolder, recipe: Recipe, out: TextIO | None = None) -> int:
    """Supervise a run to its end with progress on `out` (stdout); the exit status of the command."""
    progress = Progress(run, recipe, out or sys.stdout)
    with progress:
        state, failure = asyncio.run(_supervise(run, recipe, progress))
    progress.summary(state, failure)
    return 0 if state == "finished" else 1


async def _supervise(run: RunFolder, recipe: Recipe, progress: Progress) -> tuple[str, str]:
    supervisor = Supervisor(run, recipe, progress.update)
    work = asyncio.ensure_future(supervisor.supervise())
    loop = asyncio.get_running_loop()
    asked = False

    def interrupt() -> None:
        nonlocal asked
        if asked:
            work.cancel()
            return
        asked = True
        progress.say("cancelling; once more to end at once")
        try:
            request_cancel(run)
        except UserError as error:  # nobody can be asked through a full disk
            progress.say(str(error))
            work.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, interrupt)
    try:
        return await work, supervisor.failure
    except asyncio.CancelledError:
        return "cancelled", "ended at once; gyre resume goes on"
