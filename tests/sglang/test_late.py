"""An engine that starts late: it takes its weights from one that runs, and then has that one's version and checksum."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import msgspec
import pytest
import torch

from gyre.engines.client import EngineClient
from gyre.engines.push import push_weights
from gyre.engines.sglang.arguments import Seed
from gyre.ledger.layout import RunFolder
from gyre.processes.engine_child import EngineChild
from gyre.processes.placing import Placing
from tests.engines.place import Oracle
from tests.engines.test_conformance import ask, near
from tests.sglang.server import START_SECONDS, Server, recipe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

VERSION = "1.7-cccc"


def test_a_late_engine_takes_its_weights_from_one_that_runs(
    server: Server, tmp_path: Path, tiny_model: str, oracle: Oracle, other_oracle: Oracle
) -> None:
    """Its folder has other weights. Afterwards it can itself be written to, as any engine of the run."""
    asked = recipe(tiny_model, weights="mooncake")
    asked = msgspec.structs.replace(
        asked, rollout=msgspec.structs.replace(asked.rollout, start_timeout=START_SECONDS, liveness=START_SECONDS)
    )
    run = RunFolder(tmp_path / "run").create()
    late = EngineChild(run, asked, Path(tiny_model), "late", tmp_path / "late.log")

    async def pushed(client: EngineClient, source: Oracle, version: str) -> str:
        with Placing("127.0.0.1", Path(tiny_model), 1, torch.float32) as placing:
            return await push_weights(client, source.named(), version, 1 << 20, carrier=placing)

    async def work() -> None:
        async with aiohttp.ClientSession() as session:
            seed = server.place.client(session)
            checksum = await pushed(seed, other_oracle, VERSION)
            late.seed = Seed(server.url, server.launch.key_file, "1.8-dddd")
            assert not await late._start_from(late.seed), "the seed has another version"
            late.seed = Seed(server.url, server.launch.key_file, VERSION)
            await late.start()
            assert late.loaded == VERSION
            assert await late.client.weight_version() == VERSION
            assert await late.client.weights_checksum() == checksum
            got = await late.client.generate_once(ask([5, 6, 7], 12))
            assert got.versions == [(VERSION, 12)]
            near(got.logprobs, other_oracle.logprobs([5, 6, 7], got.output_ids))
            restored = await pushed(late.client, oracle, "restored")
            assert restored == await pushed(seed, oracle, "restored") != checksum

    async def whole() -> None:
        try:
            await work()
        finally:
            await late.close()

    asyncio.run(whole())
