"""A switch in the middle of streaming calls: every caller gets its whole reply, every token with its version."""

from __future__ import annotations

import asyncio
import json
import secrets
import time

import aiohttp
import pytest

from gyre.engines.client import EngineClient
from gyre.engines.push import push_weights
from gyre.proxy.generate import Generator, Sampled, Wanted, nothing_sampled
from gyre.proxy.routes import Route, Routes
from tests.engines.place import Oracle, Place
from tests.sglang.server import Server, unproven

pytestmark = [unproven, pytest.mark.slow, pytest.mark.timeout(900)]

CALLS = 16
TOKENS = 800
FIRST, SECOND = "1.1-aaaa", "1.2-bbbb"


def route(place: Place, cell: str, version: str) -> Route:
    assert place.api_key is not None
    return Route(url=place.url, key=place.api_key, weight_version=version, cell=cell)


class Switch:
    """Two cells, and the calls that go by their routes."""

    def __init__(self, leaves: Place, stays: Place, session: aiohttp.ClientSession) -> None:
        self.leaves, self.stays = leaves.client(session), stays.client(session)
        self.routes = Routes()
        self.routes.set_serving("leaves", route(leaves, "leaves", FIRST))
        self.routes.set_serving("stays", route(stays, "stays", SECOND))
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

    async def call(self, number: int, into: Sampled) -> None:
        self.routes.set(f"e{number}", "leaves")
        await self.generator.sample(
            Wanted(execution=f"e{number}", prompt=[number + 1, 7, 8, 9], max_tokens=TOKENS), into
        )


def test_a_cell_leaves_in_the_middle_of_sixteen_calls(
    server: Server, second: Server, oracle: Oracle, other_oracle: Oracle
) -> None:
    async def work() -> list[Sampled]:
        async with aiohttp.ClientSession() as session:
            switch = Switch(server.place, second.place, session)
            await push_weights(switch.leaves, oracle.named(), FIRST, 1 << 20)
            await push_weights(switch.stays, other_oracle.named(), SECOND, 1 << 20, tensor_parallel=2)
            into = [nothing_sampled() for _ in range(CALLS)]
            calls = [asyncio.create_task(switch.call(n, one)) for n, one in enumerate(into)]
            while (await switch.leaves.loads()).running < CALLS:
                await asyncio.sleep(0.01)
            for number in range(CALLS):
                switch.routes.set(f"e{number}", "stays")
            # Its calls were routed away; now the cell drains, gives its memory back, and trains.
            await switch.leaves.pause("abort")
            await switch.leaves.wait_idle()
            await switch.leaves.release_memory(["kv_cache", "weights"])
            await asyncio.gather(*calls)
            await switch.leaves.resume_memory(["kv_cache", "weights"])
            await push_weights(switch.leaves, oracle.named(), "restored", 1 << 20)
            return into

    done = asyncio.run(work())
    for number, one in enumerate(done):
        assert (one.finish, len(one.output), one.cell) == ("length", TOKENS, "stays")
        assert sum(span.length for span in one.spans) == TOKENS
        first = sum(span.length for span in one.spans if span.version == 1)
        whole = list(one.output)
        ours = oracle.logprobs([number + 1, 7, 8, 9], whole)
        theirs = other_oracle.logprobs([number + 1, 7, 8, 9], whole)
        assert list(one.logprobs) == pytest.approx(ours[:first] + theirs[first:], abs=1e-4)
    moved = [one for one in done if len(one.spans) == 2]
    assert moved, "the switch came before or after every call"
    assert all([span.version for span in one.spans] == [1, 2] for one in moved)


def test_no_key_is_in_the_log_or_told(server: Server) -> None:
    keys = json.loads(server.launch.key_file.read_text())
    log = server.log.read_text(errors="replace")
    info = json.dumps(server.place.drive(lambda client: client.server_info()))
    for key in keys.values():
        assert key not in log
        assert key not in info
