"""The guard of one process on its node: what a step of the job runs.

Owns the process that it starts. It tells the supervisor, on stdout, that the process runs and how it ended. Invariants:
the process never outlives the supervisor: the guard ends it when its stdin reaches end of file or the supervisor's
counter stands still (a node that loses its power closes no connection); and a job whose batch node is lost is put back
into the queue by one guard of a cell, which claimed that by exclusive creation, since nobody else can.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from gyre.launch import slurm_queue
from gyre.launch.slurm_queue import SlurmSilent
from gyre.ledger.layout import RunFolder
from gyre.ledger.liveness import LivenessWatch, read_counter
from gyre.ledger.view import LedgerView
from gyre.processes.base import EXIT_PARENT_GONE, EXIT_SCHEDULER_SILENT
from gyre.processes.children import Child
from gyre.recipe.load import load_recipe

HOST_VARIABLE = "GYRE_HOST"
POLL_SECONDS = 1.0
GRACE_SECONDS = 5.0
RESCUE_STEP_SECONDS = 3.0
"""The guards of cells try to rescue one after the other, so that the lowest live one does."""
RESCUE_SECONDS = 30.0
"""A rescue that has not ended us by then has failed: another try."""
RESCUES = 10
EXIT_ALONE = (EXIT_PARENT_GONE, EXIT_SCHEDULER_SILENT)
"""Of a process that was left alone: it may notice that before its guard does."""


def tell(**what: object) -> None:
    try:
        print(json.dumps(what), flush=True)
    except OSError:
        pass  # nobody listens: the supervisor is gone, which our stdin says too


class Guard:
    """One process, from its start to its end."""

    def __init__(self, run: RunFolder, options: argparse.Namespace) -> None:
        self.run, self.options = run, options
        self.asked_to_end = False
        self.gone = asyncio.Event()
        liveness = load_recipe(run.recipe, folders=False).local.liveness
        self._watch = LivenessWatch(time.monotonic, liveness)

    async def guard(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._asked)
        threading.Thread(target=self._read_stdin, args=(loop,), daemon=True).start()
        silence = asyncio.create_task(self._watch_supervisor())
        host = reachable_address(self.options.peers.split(","))
        child = await Child.start(
            self.options.name, self.options.argv, Path(self.options.log), {HOST_VARIABLE: host, **threads()}
        )
        tell(started=child.pid, host=socket.gethostname())
        gone = asyncio.create_task(self.gone.wait())
        ended = asyncio.create_task(child.wait())
        await asyncio.wait({gone, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            await self._let_go(child)
        code = await ended
        tell(code=self._verdict(code), reason=child.last_words())
        await child.end()
        if self.options.rescue >= 0 and (self.gone.is_set() or code in EXIT_ALONE):
            await self._rescue()
        silence.cancel()

    def _asked(self) -> None:
        self.asked_to_end = True

    def _verdict(self, code: int) -> int:
        """A process that Slurm told to end went in order; its work is not done, so it is not over with status 0."""
        return 128 + signal.SIGTERM if self.asked_to_end and code == 0 else code

    def _read_stdin(self, loop: asyncio.AbstractEventLoop) -> None:
        while os.read(0, 4096):
            pass
        loop.call_soon_threadsafe(self.gone.set)

    async def _watch_supervisor(self) -> None:
        while True:
            self._watch.observe("supervisor", read_counter(self.run.alive_path("supervisor")))
            if self._watch.dead("supervisor"):
                self.gone.set()
            await asyncio.sleep(POLL_SECONDS)

    async def _let_go(self, child: Child) -> None:
        """The process sees end of file too, and ends in order if it does so in time."""
        if child.process.stdin is not None:
            child.process.stdin.close()
        try:
            await asyncio.wait_for(child.wait(), GRACE_SECONDS)
        except TimeoutError:
            await child.end()

    # ---- rescue ----

    async def _rescue(self) -> None:
        """Was the batch node lost? Then put the job back into the queue, or give its nodes back."""
        before = read_counter(self.run.alive_path("supervisor"))
        deadline = time.monotonic() + self._watch_seconds()
        while time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)
            if read_counter(self.run.alive_path("supervisor")) != before:
                return  # it lives, and ended this step on purpose
        view = LedgerView(self.run)
        view.poll()
        if view.state.ended is not None or view.state.failure is not None:
            return
        await asyncio.sleep(self.options.rescue * RESCUE_STEP_SECONDS)
        for attempt in range(RESCUES):
            if self._claim(attempt):
                self._requeue()
            await asyncio.sleep(RESCUE_SECONDS)

    def _watch_seconds(self) -> float:
        return load_recipe(self.run.recipe, folders=False).local.liveness

    def _claim(self, attempt: int) -> bool:
        job, restart = os.environ.get("SLURM_JOB_ID", "0"), os.environ.get("SLURM_RESTART_COUNT") or "0"
        path = self.run.launch / f"rescue-{job}.{restart}.{attempt}"
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            return False
        path.write_text(f"{self.options.name} on {socket.gethostname()}\n")
        return True

    def _requeue(self) -> None:
        job = os.environ["SLURM_JOB_ID"]
        try:
            if load_recipe(self.run.recipe, folders=False).slurm.requeue:
                slurm_queue.requeue(job)
            else:
                slurm_queue.cancel(job)
        except SlurmSilent as error:
            print(f"gyre: the batch node is lost, and job {job} cannot be put back: {error}", file=sys.stderr)


def log_to(path: Path) -> None:
    """What we have to complain about goes to the process's log: after a lost batch node srun carries nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as log:
        os.dup2(log.fileno(), 2)


def threads() -> dict[str, str]:
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}


def reachable_address(peers: list[str]) -> str:
    """Our address as the job's other nodes see it: the one from which we would reach the first of them.

    No packet is sent. What our own name resolves to may be loopback, on a host that lists itself in /etc/hosts.
    """
    for peer in peers:
        if peer == os.environ.get("SLURMD_NODENAME", socket.gethostname()):
            continue
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((peer, 9))
            except OSError:
                continue  # this one does not resolve: another one may
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def main() -> None:
    parser = argparse.ArgumentParser(description="guard of one process on its node")
    parser.add_argument("--run", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--log", required=True)
    parser.add_argument("--peers", required=True, help="nodes of the job, with commas")
    parser.add_argument("--rescue", type=int, default=-1, help="my place among those who rescue the job; -1: none")
    parser.add_argument("argv", nargs="+")
    options = parser.parse_args()
    log_to(Path(options.log))

    async def start() -> None:
        await Guard(RunFolder(Path(options.run)), options).guard()

    asyncio.run(start())


if __name__ == "__main__":
    main()
