"""Mixture of experts: which experts each token went to, as the server returns it for replay in training."""

from __future__ import annotations

import base64
import secrets
from array import array
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest
from msgspec import structs

from gyre.engines.client import EngineClient
from gyre.engines.types import GenerateChunk, GenerateRequest
from gyre.engines.wire import expert_numbers
from gyre.ledger.routing import Mixture
from gyre.proxy.generate import Generator, Wanted, nothing_sampled
from gyre.proxy.routes import Route, Routes
from tests.engines.place import Oracle
from tests.engines.test_conformance import ask, near
from tests.sglang.server import Server, launch, make_moe_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LAYERS, EXPERTS, CHOSEN = 2, 4, 2


@pytest.fixture(scope="module")
def moe(installed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a model with experts that returns their routing."""
    folder = tmp_path_factory.mktemp("sglang-moe")
    model = make_moe_model(folder / "model", seed=0)
    made = launch(folder / "server", model, "--enable-return-routed-experts")
    try:
        yield made.wait_ready()
    finally:
        made.stop()


def test_routed_experts_are_the_routers(moe: Server) -> None:
    """Base64 int32 [prompt + output - 1, layers, chosen], equal to transformers' choice for each of those tokens."""
    oracle, prompt = Oracle(moe.model), list(range(20, 60))

    async def work(client: EngineClient) -> None:
        got = await client.generate_once(ask(prompt, 24, return_routed_experts=True))
        near(got.logprobs, oracle.logprobs(prompt, got.output_ids))
        assert got.routed_experts is not None
        flat = np.frombuffer(base64.b64decode(got.routed_experts), dtype=np.int32)
        found = flat.reshape(len(prompt) + len(got.output_ids) - 1, LAYERS, CHOSEN)
        wanted = oracle.experts((prompt + got.output_ids)[:-1], CHOSEN)
        assert np.array_equal(np.sort(found, axis=-1), wanted)
        assert len(np.unique(found)) == EXPERTS

    moe.place.drive(work)


class Cut:
    """The server, whose calls end as an abort after 7 tokens; its weights have the version of the route."""

    def __init__(self, client: EngineClient, version: str) -> None:
        self.client, self.version = client, version

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        left = request.max_new_tokens
        asked = structs.replace(request, max_new_tokens=min(left, 7), ignore_eos=True)
        async for chunk in self.client.generate(asked):
            end = {"finish": "abort"} if chunk.finish and left > 7 else {}
            yield structs.replace(chunk, versions=[(self.version, len(chunk.output_ids))], **end)


def test_rows_of_several_calls_are_those_of_a_whole_one(moe: Server) -> None:
    """What the proxy puts together of four calls, from the position before its own tokens on."""
    prompt, start, version = list(range(120, 160)), 24, "1.1-0123456789abcdef"
    mixture = Mixture(layers=LAYERS, experts=EXPERTS, chosen=CHOSEN)

    async def work(client: EngineClient) -> None:
        routes, into = Routes(), nothing_sampled()
        routes.set_serving("cell-0", Route(url="", key="", weight_version=version, cell="cell-0"))
        routes.set("e", "cell-0")
        generator = Generator(
            routes, lambda route: Cut(client, version), temperature=1.0, stop_ids=[], decode=str,
            token_hex=secrets.token_hex, now=lambda: 0.0, patience=0.0, mixture=mixture,
        )  # fmt: skip
        await generator.sample(
            Wanted(execution="e", prompt=array("i", prompt), max_tokens=24, routing_from=start), into
        )
        assert (len(into.output), into.continuations) == (24, 3)
        found = np.frombuffer(bytes(into.routing), dtype=np.uint8).reshape(-1, LAYERS, CHOSEN)
        whole = await client.generate_once(ask([*prompt, *into.output], 1, return_routed_experts=True))
        assert whole.routed_experts is not None
        wanted = expert_numbers(whole.routed_experts).reshape(-1, LAYERS, CHOSEN)[start:-1]
        assert np.array_equal(np.sort(found, axis=-1), np.sort(wanted, axis=-1))

    moe.place.drive(work)
