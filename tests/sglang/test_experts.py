"""Mixture of experts: which experts each token went to, as the server returns it for replay in training."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import numpy as np
import pytest

from gyre.engines.client import EngineClient
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


def router_choices(oracle: Oracle, ids: list[int]) -> np.ndarray:
    """[tokens, layers, chosen]: the experts by transformers' own router logits, in ascending order."""
    import torch

    with torch.inference_mode():
        out = oracle.net(input_ids=torch.tensor([ids]), use_cache=False, output_router_logits=True)
    chosen = [logits.topk(CHOSEN, dim=-1).indices.sort(dim=-1).values for logits in out.router_logits]
    return torch.stack(chosen, dim=1).numpy()


def test_routed_experts_are_the_routers(moe: Server) -> None:
    """Base64 int32 [prompt + output - 1, layers, chosen], equal to transformers' choice for each of those tokens."""
    oracle, prompt = Oracle(moe.model), list(range(20, 60))

    async def work(client: EngineClient) -> None:
        got = await client.generate_once(ask(prompt, 24, return_routed_experts=True))
        near(got.logprobs, oracle.logprobs(prompt, got.output_ids))
        assert got.routed_experts is not None
        flat = np.frombuffer(base64.b64decode(got.routed_experts), dtype=np.int32)
        found = flat.reshape(len(prompt) + len(got.output_ids) - 1, LAYERS, CHOSEN)
        wanted = router_choices(oracle, (prompt + got.output_ids)[:-1])
        assert np.array_equal(np.sort(found, axis=-1), wanted)
        assert len(np.unique(found)) == EXPERTS

    moe.place.drive(work)
