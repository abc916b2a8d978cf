"""Keeps the master of the run's store of KV pages.

Owns the journal `store` and the master's process. Invariants: an address is journalled when the master answers there;
a new incarnation takes its predecessor's address if it is free, for engines go on looking there. Without the master
engines find nothing in the store and read a call's prefix anew.
"""

from __future__ import annotations

import asyncio

from gyre.engines.sglang.store import free_port, master_arguments
from gyre.ledger import events as ev
from gyre.ledger.layout import RunFolder
from gyre.processes.address import node_address
from gyre.processes.base import EXIT_RESTART, EndProcess, Process, run_process
from gyre.processes.children import Child

ANSWER_POLL = 0.1


class StoreKeeper(Process):
    """gyre's store process."""

    def __init__(self, run: RunFolder, name: str) -> None:
        super().__init__(run, name)
        self.master: Child | None = None

    async def work(self) -> None:
        host = node_address()
        await self.until_accepted()
        before = self.state.store.rpartition(":")[2]
        port = free_port(host, int(before or 0))
        log_file = self.run.log_dir(self.job.attempt) / f"{self.name}-master.log"
        self.master = await Child.start(f"{self.name}-master", master_arguments(host, port, free_port(host)), log_file)
        ended = asyncio.create_task(self.master.wait())
        while not ended.done() and not await answers(host, port):
            await asyncio.sleep(ANSWER_POLL)
        if not ended.done():
            self.say(ev.StoreStarted(address=f"{host}:{port}"))
        raise EndProcess(EXIT_RESTART, f"the store's master ended with status {await ended}; see {log_file}")

    async def close(self) -> None:
        if self.master is not None:
            await self.master.end()


async def answers(host: str, port: int) -> bool:
    """Does somebody listen there?"""
    try:
        _, writer = await asyncio.open_connection(host, port)
    except OSError:
        return False
    writer.close()
    return True


if __name__ == "__main__":
    run_process(StoreKeeper)
