"""The batch script's program: the supervisor of a run inside its allocation, and its answers to Slurm's signals.

Owns the processes of the job (each a step of its own), and the liveness counter of the supervisor. It is the local
supervisor but for where a process starts. Invariants: a process starts on the node that `Places` gives it; what cannot
start waits and costs no restart; on the signal before the end the run stops at a step's boundary if one comes in time,
and the job goes back into the queue once, unless the user ended the run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import time
from pathlib import Path

import msgspec

from gyre.errors import UserError
from gyre.launch import slurm_join, slurm_queue
from gyre.launch.control import request_cancel, request_resume
from gyre.launch.local import BACKOFF_SECONDS, Supervisor
from gyre.launch.model import build_model
from gyre.launch.slurm_child import StepChild
from gyre.launch.slurm_places import Places, group_of
from gyre.launch.slurm_queue import Allocation, SlurmSilent
from gyre.launch.slurm_steps import guard, say, srun
from gyre.ledger.job import read_job, write_job
from gyre.ledger.layout import RunFolder
from gyre.ledger.liveness import Heartbeat, read_counter
from gyre.processes.children import Child
from gyre.recipe.load import load_recipe
from gyre.recipe.schema import Recipe

BEAT_SECONDS = 1.0
BOUNDARY_SHARE = 0.5
"""Of the time before the end, how much is given to the step in hand to commit."""
SAVE_SHARE = 0.8
"""By when the newest step has its checkpoint; else the run is stopped without it."""
AFTER_REQUEUE_SECONDS = 120.0


class SlurmSupervisor(Supervisor):
    """The supervisor on the batch node."""

    def __init__(self, run: RunFolder, recipe: Recipe, allocation: Allocation) -> None:
        super().__init__(run, recipe)
        self.allocation = allocation
        self.places = Places(allocation.groups, self.job.processes())
        self.leaving = False
        self._replaced: set[str] = set()

    async def _spawn(self, name: str, argv: list[str]) -> Child:
        """Start a step, again and again while it cannot start: the others go on meanwhile."""
        tries = 0
        while True:
            node = self.places.homes[name]
            if node:
                child = await StepChild.start_step(name, srun(name, node, self._guard(name, argv), group_of(name)))
                self._children[name] = child
                try:
                    if await child.started():
                        return child
                finally:
                    if not child.begun:
                        await child.end()
                say(f"{name} does not start on {node}")
                await self._look_for_lost_nodes()
            if not self.places.homes[name]:
                await self._replace(name)
            await asyncio.sleep(BACKOFF_SECONDS[min(tries, len(BACKOFF_SECONDS) - 1)])
            tries += 1

    async def prepare(self) -> None:
        """Make the model, when a script of the recipe does: here, and not on the login node."""
        if self.recipe.model.build:
            await asyncio.to_thread(build_model, self.recipe.model, self.recipe.seed, Path(self.job.model), say)

    async def _look_for_lost_nodes(self) -> None:
        """Slurm takes a node that it gave up out of the job, for good."""
        try:
            known = await asyncio.to_thread(slurm_queue.ask, [self.allocation.job_id])
            found = known.get(self.allocation.job_id)
            left = tuple(tuple(slurm_queue.expand(c.nodes)) for c in found.components) if found else ()
        except SlurmSilent as error:
            say(f"Slurm does not say which nodes are left: {error}")
            return
        if len(left) != len(self.allocation.groups):
            return
        before = dict(self.places.homes)
        leaving = self.places.lose(left)
        for name, node in before.items():
            if node != self.places.homes[name]:
                say(f"{name}: {node} -> {self.places.homes[name] or 'no node is left for it'}")
        for name in leaving:
            await self._children[name].end()

    def _guard(self, name: str, argv: list[str]) -> list[str]:
        rescue = self.job.cells.index(name) if name in self.job.cells else -1
        peers = [node for nodes in self.allocation.groups for node in nodes]
        return guard(self.recipe.slurm.container, self.run.path, name, self._log(name), peers, argv, rescue)

    async def _replace(self, name: str) -> None:
        """Ask Slurm, once, for another node in a job of its own: perhaps the lost one, when it comes back."""
        if name in self._replaced:
            return
        self._replaced.add(name)
        try:
            job_id = await asyncio.to_thread(slurm_join.replace, self.run, self.recipe, name)
            say(f"{name} waits for a node in job {job_id}")
        except UserError as error:
            say(f"{name} gets no other node: {error}")

    def _kill_hung(self) -> None:
        """As on one machine; srun ends its step when it is told to."""
        for name, child in self._children.items():
            self._observe(name)
            if child.running and self._liveness.dead(name):
                self._liveness.forget(name)
                child.process.send_signal(signal.SIGTERM)

    def _observe(self, name: str) -> None:
        self._liveness.observe(name, read_counter(self.run.alive_path(name)))

    async def beat(self) -> None:
        heart = Heartbeat(self.run.alive_path("supervisor"))
        while True:
            heart.beat()
            await asyncio.sleep(BEAT_SECONDS)

    async def leave(self) -> None:
        """The job's time is over soon: stop after the step in hand, or without it, with what is committed saved."""
        if self.leaving or self.view.state.cancel:
            return
        self.leaving = True
        began, seconds = time.monotonic(), self.recipe.slurm.signal_before_end
        say("the job ends soon: stopping after the step in hand, if it is done in time")
        before = self._committed()
        while self._committed() == before and time.monotonic() < began + BOUNDARY_SHARE * seconds:
            await asyncio.sleep(BEAT_SECONDS)
        if self.view.state.cancel:
            self.leaving = False  # the user's word comes first
            return
        request_cancel(self.run, leaving=True)
        while self.view.state.ended is None and time.monotonic() < began + SAVE_SHARE * seconds:
            await asyncio.sleep(BEAT_SECONDS)
        if self.view.state.ended is None:
            say("the run does not stop in order in time: stopping at once")
            request_cancel(self.run, now=True, leaving=True)

    def _committed(self) -> tuple[int, int]:
        reign = self.view.state.reign()
        return (max(self.view.state.lineages, default=0), reign.step() if reign is not None else 0)


def count_attempt(run: RunFolder, allocation: Allocation) -> None:
    """A requeued job is the run's next attempt; the first start of a job was counted when it was submitted."""
    if allocation.restart:
        job = read_job(run)
        write_job(run, msgspec.structs.replace(job, attempt=job.attempt + 1))


async def hold(run: RunFolder, recipe: Recipe, allocation: Allocation) -> int:
    """Supervise the run in this allocation; the exit status of the batch script."""
    own = read_job(run).processes()
    slurm_join.recall(run, own)
    supervisor = SlurmSupervisor(run, recipe, allocation)
    beat = asyncio.create_task(supervisor.beat())
    work = asyncio.ensure_future(supervisor.supervise())
    loop = asyncio.get_running_loop()
    leaving: list[asyncio.Task[None]] = []
    loop.add_signal_handler(signal.SIGUSR2, lambda: leaving.append(asyncio.create_task(supervisor.leave())))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, work.cancel)
    try:
        state = await work
    except asyncio.CancelledError:
        say("ended by Slurm; what is in the ledger stays")
        return 128 + signal.SIGTERM
    if supervisor.failure:
        say(f"gyre: {supervisor.failure}")
    say(f"the run is {state}")
    if state == "cancelled" and supervisor.view.state.leaving:
        await _back_into_the_queue(run, recipe, allocation)
    beat.cancel()
    slurm_join.recall(run, own)
    return 1 if state == "failed" else 0


async def _back_into_the_queue(run: RunFolder, recipe: Recipe, allocation: Allocation) -> None:
    """The run goes on later: in this job when it may be requeued, else by `gyre resume`."""
    request_resume(run)
    if not recipe.slurm.requeue:
        say("slurm.requeue is off: gyre resume goes on")
        return
    try:
        slurm_queue.requeue(allocation.job_id)
    except SlurmSilent as error:
        say(f"gyre: job {allocation.job_id} cannot be requeued: {error}")
        return
    await asyncio.sleep(AFTER_REQUEUE_SECONDS)  # Slurm ends us; an exit of our own could count as the job's end


def main() -> None:
    parser = argparse.ArgumentParser(description="a run inside its Slurm job")
    parser.add_argument("--run", required=True)
    run = RunFolder(Path(parser.parse_args().run))
    allocation = Allocation.read(os.environ)
    count_attempt(run, allocation)
    recipe = load_recipe(run.recipe, folders=False)
    run.log_dir(read_job(run).attempt).mkdir(parents=True, exist_ok=True)
    nodes = "; ".join(", ".join(group) for group in allocation.groups)
    say(f"job {allocation.job_id}, attempt {read_job(run).attempt}, on {nodes}")
    raise SystemExit(asyncio.run(hold(run, recipe, allocation)))


if __name__ == "__main__":
    main()
