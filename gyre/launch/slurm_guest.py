"""The batch script's program of a job that gives a run more nodes (`slurm_join.py`).

Owns the steps of its job. Invariants: it keeps the processes that it was given going until the run has ended, and
nothing else of the run; a guest cell is never the core. Its job may end at any moment: the scheduler sees a lost
process.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import time
from pathlib import Path

from gyre.launch.slurm_child import StepChild
from gyre.launch.slurm_queue import Allocation
from gyre.launch.slurm_steps import guard, program, say, srun
from gyre.ledger.job import read_job
from gyre.ledger.layout import RunFolder
from gyre.ledger.view import LedgerView
from gyre.recipe.load import load_recipe

POLL_SECONDS = 1.0
BACKOFF_SECONDS = (1.0, 2.0, 5.0, 10.0, 30.0)
STEADY_SECONDS = 60.0
"""A process that ran for so long starts again at once."""


class GuestSupervisor:
    """Keeps the processes of this job going until the run has ended."""

    def __init__(self, run: RunFolder, names: list[str], allocation: Allocation) -> None:
        self.run, self.allocation = run, allocation
        self.job = read_job(run)
        self._container = load_recipe(run.recipe, folders=False).slurm.container
        self.view = LedgerView(run)
        nodes = allocation.groups[0]
        self.homes = {name: nodes[index % len(nodes)] for index, name in enumerate(names)}
        self._children: dict[str, StepChild] = {}
        self.view.poll()
        schedulers = self.view.state.opened.get("scheduler", {})
        self._ended_before = max(schedulers, default=0) if self.view.state.ended is not None else -1

    def _over(self) -> bool:
        """Has the run ended since we came? One that only goes back into the queue goes on."""
        state = self.view.state
        if state.ended is None or max(state.opened.get("scheduler", {}), default=0) == self._ended_before:
            return False
        return state.ended.state != "cancelled" or (bool(state.cancel) and not state.leaving)

    async def supervise(self) -> None:
        """Until the run has ended."""
        keepers = [asyncio.create_task(self._keep(name)) for name in self.homes]
        try:
            while True:
                self.view.poll()
                if self._over():
                    return
                for keeper in keepers:
                    if keeper.done():
                        keeper.result()
                await asyncio.sleep(POLL_SECONDS)
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)
            await asyncio.gather(*(child.end() for child in self._children.values()))

    async def _keep(self, name: str) -> None:
        tries = 0
        while True:
            began = time.monotonic()
            child = await StepChild.start_step(name, self._command(name))
            self._children[name] = child
            code = await child.wait()
            await child.end()
            say(f"{name} ended with status {code}" + (f": {child.last_words()}" if child.last_words() else ""))
            tries = 0 if time.monotonic() - began > STEADY_SECONDS else tries + 1
            await asyncio.sleep(BACKOFF_SECONDS[min(tries, len(BACKOFF_SECONDS) - 1)])

    def _command(self, name: str) -> list[str]:
        log = self.run.log_dir(self.job.attempt) / f"{name}.log"
        argv = program(self.run.path, name)
        return srun(name, self.homes[name], guard(self._container, self.run.path, name, log, self._peers(), argv))

    def _peers(self) -> list[str]:
        """Nodes of the run's own job, which must reach ours, then ours."""
        hosts = {opened[max(opened)].host for opened in self.view.state.opened.values()}
        return [*sorted(hosts), *self.allocation.groups[0]]


async def hold(run: RunFolder, names: list[str], allocation: Allocation) -> None:
    supervisor = GuestSupervisor(run, names, allocation)
    work = asyncio.ensure_future(supervisor.supervise())
    loop = asyncio.get_running_loop()
    ended, warned = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    loop.add_signal_handler(signal.SIGUSR2, warned.set)
    waiting = [asyncio.create_task(ended.wait()), asyncio.create_task(warned.wait())]
    await asyncio.wait({work, *waiting}, return_when=asyncio.FIRST_COMPLETED)
    if work.done():
        work.result()
        say("the run is over")
        return
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    say("ended by Slurm")
    if not ended.is_set():
        await ended.wait()  # an exit of our own would be the job's end: a preempted job is to come back


def main() -> None:
    parser = argparse.ArgumentParser(description="processes of a run in a job of their own")
    parser.add_argument("--run", required=True)
    parser.add_argument("--names", required=True, help="names, with commas")
    options = parser.parse_args()
    allocation = Allocation.read(os.environ)
    say(f"job {allocation.job_id}: {options.names} on {', '.join(allocation.groups[0])}")
    asyncio.run(hold(RunFolder(Path(options.run)), options.names.split(","), allocation))


if __name__ == "__main__":
    main()
