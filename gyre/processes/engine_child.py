"""One engine of a cell, as its lead sees it: the process, its client, and the moves of a role switch.

Owns the engine's process and keys; an engine whose first node is a further one is its agent's process. Invariants:
memory is released only when nothing runs in the engine; a push of weights is whole or the engine serves nothing; each
start has key and port files of its own, so a predecessor that is still on its way out is never taken for it; an engine
that answers nothing any more is ended, so that its lead sees it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
from pathlib import Path

import aiohttp

from gyre.engines.client import EngineClient, vocabulary
from gyre.engines.errors import EngineError, EngineUnavailable
from gyre.engines.launch import engine_launch, forget_keys
from gyre.engines.sglang.arguments import NO_SEED, NO_STORE, EnginePart, Seed
from gyre.engines.sglang.store import free_port
from gyre.errors import UserError
from gyre.ledger.layout import RunFolder
from gyre.processes.address import node_address, node_interface
from gyre.processes.children import EXIT_USER_ERRORS, Child, ChildDied
from gyre.processes.parts import Nodes, Part
from gyre.recipe.places import EnginePlace
from gyre.recipe.schema import Recipe

log = logging.getLogger("gyre")

TAGS = ["kv_cache", "weights"]
START_POLL = 0.1
ASK_SECONDS = 2.0
"""Between questions whether it still answers."""


class EngineChild:
    """Start it with `start`; `url` and `key_file` are what proxies need to reach it.

    `nodes`: the cell's further nodes, where `place` has any. `weights_key`: the secret by which its weights are shared.
    """

    def __init__(
        self,
        run: RunFolder,
        recipe: Recipe,
        model: Path,
        name: str,
        log_file: Path,
        place: EnginePlace | None = None,
        nodes: Nodes | None = None,
        weights_key: str = "",
    ) -> None:
        self.run, self.recipe, self.model, self.name, self.log_file = run, recipe, model, name, log_file
        self.place = place or EnginePlace()
        self.child: Child | Part | None = None
        self.url = ""
        self.key_file = ""
        """Name of the file in keys/; a proxy that finds it gone waits for the next announcement."""
        self.released = False
        self.store = NO_STORE
        """The store that it joins at its next start."""
        self.seed = NO_SEED
        """The running engine whose weights it takes over at its next start."""
        self.loaded = ""
        """The version that it has from another engine, until it is pushed one or releases its memory."""
        self._nodes, self._weights_key = nodes, weights_key
        self._parts: list[Part] = []
        self._ending: list[asyncio.Task[None]] = []
        self._session: aiohttp.ClientSession | None = None
        self._client: EngineClient | None = None
        self._watch: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        return self.child is not None and self.child.running

    @property
    def client(self) -> EngineClient:
        if self._client is None:
            raise RuntimeError(f"{self.name} has not started")
        return self._client

    @property
    def shares(self) -> bool:
        """Does memory of the cell's first node, where weights are given, reach all of it, and can it read there?"""
        return self.recipe.rollout.engine == "sglang" and self.place.nodes == range(1)

    async def start(self) -> None:
        """Launch and wait until it answers, within the recipe's start timeout. Raises ChildDied.

        With the weights of `seed`, if that can give them: `loaded` says so then. Otherwise its weights are its
        folder's, or unknown, and are to be pushed.
        """
        if not (self.seed.url and self._here and await self._start_from(self.seed)):
            await self._launch(NO_SEED)

    async def _start_from(self, seed: Seed) -> bool:
        """False when it does not run then. The seed may be given other weights at any moment, also while it is read:
        what counts is that it has the same version afterwards, and that the checksums are equal."""
        keys: dict[str, str] = {}
        with contextlib.suppress(FileNotFoundError):  # it has ended, or is being started again
            keys = json.loads(seed.keys.read_text())
        async with aiohttp.ClientSession() as session:
            giver = EngineClient(seed.url, session, keys.get("api_key"), keys.get("admin_key"))
            try:
                if await giver.weight_version() != seed.version:
                    return False
                await self._launch(seed)
                same = await self.client.weights_checksum() == await giver.weights_checksum()
                if same and await giver.weight_version() == seed.version:
                    await self.client.set_version(seed.version)
                    self.loaded = seed.version
            except (EngineError, ChildDied) as error:
                log.error("%s does not start with the weights of %s: %s", self.name, seed.url, error)
        log.info("%s was started from %s: %s", self.name, seed.url, self.loaded or "its weights are not those")
        return self.running

    @property
    def _here(self) -> bool:
        """Is its first node this one?"""
        return self.place.nodes[0] == 0

    async def _launch(self, seed: Seed) -> None:
        await self.close()
        self.key_file = f"{self.name}.{secrets.token_hex(4)}"
        host = await (self._launch_here(seed) if self._here else self._launch_there())
        child = self.child
        if child is None:
            raise ChildDied(f"{self.name} was closed before it had started")
        self._ending = [asyncio.create_task(self._end_with(lost, child)) for lost in self._parts]
        try:
            port = await asyncio.wait_for(self._port(), self.recipe.rollout.start_timeout)
        except TimeoutError:
            raise ChildDied(f"{self.name} did not answer in rollout.start_timeout; see {self.log_file}") from None
        self.url = f"http://{host}:{port}"
        keys = json.loads((self.run.keys / self.key_file).read_text())
        self._session = aiohttp.ClientSession()
        self._client = EngineClient(self.url, self._session, keys["api_key"], keys["admin_key"], vocabulary(self.model))
        self.released = False
        self._watch = asyncio.create_task(self._end_when_silent(child, self._client))

    async def _launch_here(self, seed: Seed) -> str:
        """Start its process, and order its parts elsewhere; the address on which it will answer."""
        forget_keys(self.run.keys, self.name)
        host, nodes = node_address(), len(self.place.nodes)
        rendezvous = f"{host}:{free_port(host)}" if nodes > 1 else ""
        self._order_parts(rendezvous)
        part = EnginePart(nodes, 0, rendezvous, self.place.gpus)
        where = (self.run.keys, self.key_file, host)
        launch = engine_launch(self.recipe, self.model, *where, self.store, part, seed, self._weights_key)
        meeting = node_interface() if self._parts else {}
        self.child = await Child.start(self.name, launch.argv, self.log_file, {**launch.env, **meeting})
        return host

    async def _launch_there(self) -> str:
        """Order all of it from agents, the first part first: that one says where the others meet it, and it answers on
        that host too."""
        if self._nodes is None:
            raise RuntimeError(f"{self.name} lies on a further node, and there is none")
        self.child = first = self._nodes.start_engine(self.place.nodes[0], self.place.engine, self.key_file)
        said = await first.started
        if said is None:
            raise await self._death(first)
        self._order_parts(said.rendezvous)
        return said.rendezvous.rpartition(":")[0]

    def _order_parts(self, rendezvous: str) -> None:
        """Order the engine's parts on nodes after its first, if it has any."""
        nodes, engine = self._nodes, self.place.engine
        if nodes is not None:
            for node in self.place.nodes[1:]:
                key_file = f"{nodes.agents[node - 1]}-engine-{engine}.{secrets.token_hex(4)}"
                self._parts.append(nodes.start_engine(node, engine, key_file, rendezvous))

    async def _end_with(self, part: Part, child: Child | Part) -> None:
        """The engine ends with any of its parts: the others would wait for that one."""
        await part.wait()
        if child.running:
            log.error("%s: %s; ending the rest", self.name, part.reason)
            await child.end()

    async def _port(self) -> int:
        port_file = self.run.keys / f"{self.key_file}.port"
        while not port_file.exists():
            if self.child is not None and not self.running:
                raise await self._death(self.child)
            await asyncio.sleep(START_POLL)
        return int(port_file.read_text())

    async def _death(self, child: Child | Part) -> Exception:
        """Why it did not start. A server says what a user can mend in its last line, "error: ..."."""
        code = await child.wait()
        said = self.log_file.read_text(errors="replace") if self.log_file.exists() else ""
        last = (said.strip().splitlines() or [""])[-1]
        if code in EXIT_USER_ERRORS and last.startswith("error: "):
            return UserError(f"{self.name}: {last.removeprefix('error: ')}", code=code)
        return ChildDied(f"{self.name} ended with status {code} before it answered; see {self.log_file}")

    async def _end_when_silent(self, child: Child | Part, client: EngineClient) -> None:
        """A server whose scheduler hangs still has a process: ask it, and end it when it has said nothing for long."""
        loop, limit = asyncio.get_running_loop(), self.recipe.rollout.liveness
        heard = loop.time()
        while child.running:
            await asyncio.sleep(min(ASK_SECONDS, limit / 4))
            try:
                await client.server_info(timeout=limit)
                heard = loop.time()
            except EngineError as error:
                if child.running and loop.time() - heard >= limit:
                    log.error("%s answered nothing for %g s (%s): ending it", self.name, limit, error)
                    await child.end()

    async def drain(self) -> None:
        """Cut the calls in flight; new ones wait in the engine, which their proxies leave."""
        await self.client.pause("abort")
        await self.client.wait_idle()

    async def release(self) -> None:
        """Give the memory back, and wait until it is measured free."""
        self.loaded = ""
        await self.client.release_memory(TAGS)
        self.released = True

    async def resume(self) -> None:
        if self.released:
            await self.client.resume_memory(TAGS)
            self.released = False

    async def version(self) -> str:
        """The weight version it reports; "" when it does not answer."""
        try:
            return await self.client.weight_version()
        except EngineUnavailable:
            return ""

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        for task in self._ending:
            task.cancel()
        for part in self._parts:
            await part.end()
        if self._session is not None:
            await self._session.close()
        if self.child is not None:
            await self.child.end()
        self._session, self._client, self.child, self._watch = None, None, None, None
        self.loaded = ""
        self._parts, self._ending = [], []
