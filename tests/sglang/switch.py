"""Two cells, the calls that go by their routes, and the moment at which one cell leaves."""

from __future__ import annotations

import asyncio
import secrets
import time
from array import array

import aiohttp

from gyre.engines.client import EngineClient
from gyre.proxy.generate import Generator, Sampled, Wanted, nothing_sampled
from gyre.proxy.routes import Route, Routes
from tests.engines.place import Place


def route(place: Place, cell: str, version: str) -> Route:
    assert place.api_key is not None
    return Route(url=place.url, key=place.api_key, weight_version=version, cell=cell)


class Switch:
    """Cell "leaves" and cell "stays"; `into` has the calls after `leave_in_the_middle`."""

    def __init__(
        self, leaves: Place, stays: Place, session: aiohttp.ClientSession, version: str, stays_version: str
    ) -> None:
        self.leaves, self.stays = leaves.client(session), stays.client(session)
        self.routes = Routes()
        self.routes.set_serving("leaves", route(leaves, "leaves", version))
        self.routes.set_serving("stays", route(stays, "stays", stays_version))
        self.into: list[Sampled] = []
        self.generator = Generator(
            self.routes,
            self._engine,
            temperature=1.0,
            stop_ids=[],
            decode=lambda ids: "",
            token_hex=secrets.token_hex,
            now=time.time,
        )

    def _engine(self, found: Route) -> EngineClient:
        return self.leaves if found.cell == "leaves" else self.stays

    async def ready_to_leave(self) -> None:
        """More that has to be waited for before the first cell leaves."""

    async def call(self, number: int, prompt: list[int], tokens: int) -> None:
        self.routes.set(f"e{number}", "leaves")
        wanted = Wanted(execution=f"e{number}", prompt=array("i", prompt), max_tokens=tokens)
        await self.generator.sample(wanted, self.into[number])

    async def leave_in_the_middle(self, prompts: list[list[int]], tokens: int) -> None:
        """Once each call has tokens, the first cell's calls are routed away; it drains and releases; they end."""
        self.into = [nothing_sampled() for _ in prompts]
        calls = [asyncio.create_task(self.call(n, prompt, tokens)) for n, prompt in enumerate(prompts)]
        while not all(one.first_token for one in self.into):
            await asyncio.sleep(0.01)
        await self.ready_to_leave()
        for number in range(len(prompts)):
            self.routes.set(f"e{number}", "stays")
        await self.leaves.pause("abort")
        await self.leaves.wait_idle()
        await self.leaves.release_memory(["kv_cache", "weights"])
        await asyncio.gather(*calls)
        await self.leaves.resume_memory(["kv_cache", "weights"])
