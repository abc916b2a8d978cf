"""The store of KV pages: what one engine has read, another takes over at a switch; and a run whose master dies."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from gyre.engines.client import EngineClient
from gyre.engines.push import push_weights
from gyre.engines.sglang.arguments import STORE_PAGE, Store
from gyre.engines.sglang.install import interpreter
from gyre.engines.sglang.store import free_port, master_arguments
from gyre.engines.types import GenerateChunk, GenerateRequest
from gyre.proxy.routes import Route
from tests.chaos import moments, procs
from tests.chaos.harness import ROOT, SMALL_MICROSTEPS, Drill
from tests.chaos.moments import SATELLITE
from tests.engines.place import Oracle
from tests.engines.test_conformance import ask, near
from tests.sglang.server import START_SECONDS, Server, launch
from tests.sglang.switch import Switch
from tests.sglang.test_run import SMALL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

CALLS, TOKENS, PROMPT = 4, 800, 1600
FIRST, SECOND = "1.1-aaaa", "1.2-bbbb"


@dataclass(frozen=True)
class Pair:
    """Two servers that share a store, and the status page of its master."""

    one: Server
    other: Server
    status: str

    async def keys(self, session: aiohttp.ClientSession) -> int:
        """Objects in the store: two a page, keys and values of the attention."""
        async with session.get(self.status) as answer:
            lines = (await answer.text()).splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("master_key_count"))


@pytest.fixture(scope="module")
def pair(installed: None, tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("store")
    port, metrics = free_port("127.0.0.1"), free_port("127.0.0.1")
    with open(folder / "master.log", "wb") as log:
        argv = master_arguments("127.0.0.1", port, metrics)
        master = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    store = Store(f"127.0.0.1:{port}", "run-1")
    made = [launch(folder / name, tiny_model, store=store, store_mb=64) for name in "ab"]
    try:
        yield Pair(made[0].wait_ready(), made[1].wait_ready(), f"http://127.0.0.1:{metrics}/metrics")
    finally:
        for one in made:
            one.stop()
        master.kill()
        master.wait()


class Noting:
    """An engine's client that notes how much of each call's prompt was cached: cell -> (cached, prompt) a call."""

    def __init__(self, client: EngineClient, into: list[tuple[int, int]]) -> None:
        self.client, self.into = client, into

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        last = None
        try:
            async for chunk in self.client.generate(request):
                last = chunk
                yield chunk
        finally:
            if last is not None:
                self.into.append((last.cached_tokens, len(request.input_ids)))


class Watched(Switch):
    """A switch that keeps what each cell's calls found cached. It comes when the prompts' pages have got into the
    store, which is done beside the sampling."""

    def __init__(self, pair: Pair, session: aiohttp.ClientSession) -> None:
        super().__init__(pair.one.place, pair.other.place, session, FIRST, FIRST)
        self.pair, self.session, self.before = pair, session, 0
        self.found: dict[str, list[tuple[int, int]]] = {"leaves": [], "stays": []}

    def _engine(self, found: Route) -> Noting:  # type: ignore[override]
        return Noting(super()._engine(found), self.found[found.cell])

    async def ready_to_leave(self) -> None:
        while await self.pair.keys(self.session) < self.before + 2 * CALLS * (PROMPT // STORE_PAGE):
            await asyncio.sleep(0.05)


def prompts(seed: int) -> list[list[int]]:
    return np.random.default_rng(seed).integers(0, 600, (CALLS, PROMPT)).tolist()


def test_continued_calls_find_their_prefix_in_the_store(pair: Pair, oracle: Oracle) -> None:
    """A cell leaves in the middle of its calls: at least 90 % of what each had read is not read again."""

    async def work() -> Watched:
        async with aiohttp.ClientSession() as session:
            switch = Watched(pair, session)
            for client in (switch.leaves, switch.stays):
                await push_weights(client, oracle.named(), FIRST, 1 << 20)
            switch.before = await pair.keys(session)
            await switch.leave_in_the_middle(prompts(1), TOKENS)
            return switch

    switch = asyncio.run(work())
    for prompt, one in zip(prompts(1), switch.into, strict=True):
        assert (one.finish, len(one.output), one.cell) == ("length", TOKENS, "stays")
        near(list(one.logprobs), oracle.logprobs(prompt, list(one.output)))
    assert [cached for cached, _ in switch.found["leaves"]] == [0] * CALLS
    assert len(switch.found["stays"]) == CALLS
    for cached, length in switch.found["stays"]:
        assert length > PROMPT, "the switch came before a call had begun"
        assert cached >= 0.9 * PROMPT, switch.found


def test_kv_of_other_weights_is_never_taken_from_the_store(pair: Pair, oracle: Oracle, other_oracle: Oracle) -> None:
    """The salt is the weights' version: what the first weights left in the store is not found under the second."""
    prompt = prompts(2)[0]

    async def work() -> None:
        async with aiohttp.ClientSession() as session:
            one, other = (server.place.client(session) for server in (pair.one, pair.other))
            await push_weights(one, oracle.named(), FIRST, 1 << 20)
            await push_weights(other, other_oracle.named(), SECOND, 1 << 20)
            await one.generate_once(ask(prompt, 4, cache_salt=FIRST))
            moved = await other.generate_once(ask(prompt, 8, cache_salt=SECOND))
            assert moved.cached_tokens == 0
            near(moved.logprobs, other_oracle.logprobs(prompt, moved.output_ids))

    asyncio.run(work())


def test_a_run_goes_on_when_the_stores_master_dies(
    installed: None, tmp_path_factory: pytest.TempPathFactory, cache: Path
) -> None:
    settings = (*SMALL_MICROSTEPS, *SMALL, f"rollout.python={interpreter()}", "rollout.store_mb=64")
    recipe = ROOT / "recipes" / "quickstart-sglang.toml"
    drill = Drill(tmp_path_factory.mktemp("stored") / "runs", cache, 2, settings, recipe, deadline=2 * START_SECONDS)
    drill.home.mkdir()
    try:
        drill.submit()
        drill.until(lambda state: moments.live(state, SATELLITE))
        master = procs.child_of(drill.pid("store"), "mooncake_master")
        drill.kill(master)
        drill.until(lambda state: len(state.stores) == 2)
        drill.until_both_train()
        drill.assert_completed()
        assert drill.state.stores[1] == drill.state.stores[2], "engines look where the first was"
        assert drill.state.incarnation(SATELLITE) == 1
        assert all(found.outcome() is not None for found in drill.state.executions.values())
    finally:
        drill.stop()
