"""What only the reference engine promises:

Refusals where SGLang dies, its process's manners, and SGLang's raw shapes.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gyre.engines.errors import EngineUnavailable
from gyre.engines.push import push_weights
from gyre.engines.types import GenerateRequest, new_rid

from .place import VOCABULARY, Oracle, Place, start_engine, stop_engine

Ask = Callable[..., Awaitable[tuple[int, Any]]]


def raw(place: Place, work: Callable[[Ask], Awaitable[None]]) -> None:
    """Run `work` with a function that posts JSON with the admin's or the user's key."""
    if place.real:
        pytest.skip("about the reference engine")

    async def body() -> None:
        async with aiohttp.ClientSession(place.url) as session:

            async def ask(path: str, value: object = None, method: str = "POST") -> tuple[int, Any]:
                user = path in ("/generate", "/v1/loads", "/model_info", "/server_info")
                key = place.api_key if user else place.admin_key
                headers = {"Authorization": f"Bearer {key}"}
                data = value if isinstance(value, bytes) else json.dumps(value).encode()
                async with session.request(method, path, data=data, headers=headers) as response:
                    text = await response.text()
                    is_json = response.content_type == "application/json"
                    return response.status, json.loads(text) if is_json else text

            async with asyncio.timeout(60):
                await work(ask)

    asyncio.run(body())


def test_abort_matches_prefixes(place: Place) -> None:
    async def work(ask: Ask) -> None:
        many = [
            {"input_ids": [1, 2], "rid": rid, "sampling_params": {"max_new_tokens": 3000, "ignore_eos": True}}
            for rid in ("q-1", "q-10", "q-2")
        ]
        tasks = [asyncio.create_task(ask("/generate", one)) for one in many]
        while (await ask("/v1/loads", method="GET"))[1]["loads"][0]["num_running_reqs"] < 3:
            await asyncio.sleep(0)
        assert (await ask("/abort_request", {"rid": "q-1"})) == (200, "")
        for task in tasks[:2]:
            status, reply = await task
            meta = reply["meta_info"]
            assert status == 200 and len(reply["output_ids"]) == meta["completion_tokens"]
            assert meta["finish_reason"] == {
                "type": "abort",
                "message": "Aborted",
                "status_code": None,
                "err_type": None,
            }
        assert not tasks[2].done()
        await ask("/abort_request", {"abort_all": True})
        await tasks[2]

    raw(place, work)


def test_what_kills_sglang_is_refused(place: Place) -> None:
    async def work(ask: Ask) -> None:
        for bad in (
            {"input_ids": [VOCABULARY]},
            {"input_ids": []},
            {"input_ids": [1], "sampling_params": {"top_p": 0.9}},
            {"input_ids": [1], "sampling_params": {"json_schema": "{}"}},
            {"input_ids": [1], "logprob_start_len": 7},
            {"input_ids": "text"},
            b"not json",
        ):
            status, reply = await ask("/generate", bad)
            assert status == 400 and reply["error"]["message"]
        for path, bad in (
            ("/resume_memory_occupation", {"tags": ["weights"]}),
            ("/release_memory_occupation", {"tags": ["everything"]}),
            ("/end_weight_update", {}),
            ("/pause_generation", {"mode": "sideways"}),
            ("/update_weights_from_tensor", {"serialized_named_tensors": ["x", "y"]}),
            ("/weights_checker", {"action": "snapshot"}),
            ("/flush_cache?timeout=soon", {}),
        ):
            assert (await ask(path, bad))[0] == 400, path
        assert (await ask("/health_generate", method="GET"))[0] == 200

    raw(place, work)


def test_shapes_are_sglangs(place: Place) -> None:
    async def work(ask: Ask) -> None:
        body = {
            "input_ids": [5, 6, 7],
            "return_logprob": True,
            "logprob_start_len": 0,
            "sampling_params": {"max_new_tokens": 2, "ignore_eos": True},
        }
        _, reply = await ask("/generate", body)
        meta = reply["meta_info"]
        assert [row[1:] for row in meta["input_token_logprobs"]] == [[5, None], [6, None], [7, None]]
        assert meta["input_token_logprobs"][0][0] is None and meta["cached_tokens"] == 0
        assert [row[1] for row in meta["output_token_logprobs"]] == reply["output_ids"]
        assert meta["finish_reason"] == {"type": "length", "length": 2}
        version = (await ask("/model_info", method="GET"))[1]["weight_version"]
        assert meta["weight_versions"] == [{"version": version, "start": 0, "end": 2}]
        _, found = await ask("/weights_checker", {"action": "checksum"})
        assert found["success"] and found["ranks"][0]["per_gpu_checksum"] == found["per_engine_checksum"]
        assert {len(one) for one in found["ranks"][0]["checksums"].values()} == {16}
        assert (await ask("/flush_cache", method="GET"))[1].startswith("Cache flushed")

    raw(place, work)


def test_released_memory_answers_unavailable(place: Place, oracle: Oracle) -> None:
    """Calls go on elsewhere, instead of waiting for weights that another process may bring."""
    if place.real:
        pytest.skip("about the reference engine")

    async def work(client: Any) -> None:
        request = GenerateRequest(input_ids=[1], rid=new_rid(secrets.token_hex), max_new_tokens=1)
        await client.release_memory(["weights"])
        for _ in range(2):
            with pytest.raises(EngineUnavailable, match="released or its weights are missing"):
                await client.generate_once(request)
            if _ == 0:
                await client.resume_memory(["weights"])
        await push_weights(client, oracle.named(), "again", 1 << 20)
        assert (await client.generate_once(request)).finish == "length"

    place.drive(work)


def test_an_update_without_a_pause_waits_for_running_requests(place: Place) -> None:
    """Not for queued ones: those go on under the new weights."""

    async def work(ask: Ask) -> None:
        body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 200, "ignore_eos": True}}
        running = asyncio.create_task(ask("/generate", body))
        while (await ask("/v1/loads", method="GET"))[1]["loads"][0]["num_running_reqs"] == 0:
            await asyncio.sleep(0)
        assert (await ask("/begin_weight_update", {}))[0] == 200
        assert (await ask("/v1/loads", method="GET"))[1]["loads"][0]["num_running_reqs"] == 0
        queued = asyncio.create_task(ask("/generate", body))
        while (await ask("/v1/loads", method="GET"))[1]["loads"][0]["num_waiting_reqs"] == 0:
            await asyncio.sleep(0)
        assert (await ask("/begin_weight_update", {}))[0] == 400
        assert (await ask("/end_weight_update", {}))[0] == 200
        for task in (running, queued):
            assert (await task)[1]["meta_info"]["finish_reason"] == {"type": "length", "length": 200}

    raw(place, work)


def test_an_unknown_address_is_unavailable(place: Place) -> None:
    async def work(client: Any) -> None:
        client.base_url = "http://127.0.0.1:1"
        with pytest.raises(EngineUnavailable, match="ClientConnectorError"):
            await client.server_info()
        assert not await client.health()

    place.drive(work)


def test_a_process_leaves_with_its_parent_and_breaks_its_calls(tmp_path: Path, tiny_model: str) -> None:
    process, url = start_engine(tmp_path, tiny_model, "--context-length", "4096")

    async def work(client: Any) -> int:
        request = GenerateRequest(input_ids=[1], rid=new_rid(secrets.token_hex), max_new_tokens=4000, ignore_eos=True)
        stream = client.generate(request)
        await anext(stream)
        code = await asyncio.to_thread(stop_engine, process)
        with pytest.raises(EngineUnavailable):
            async for _ in stream:
                pass
        return code

    assert Place(url, "api", "admin", tiny_model, VOCABULARY).drive(work) == 0


def test_a_folder_without_a_model_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from gyre.engines.reference.__main__ import main

    assert main(["--model", str(tmp_path)]) == 2
    assert "config.json is missing" in capsys.readouterr().err


def test_experts_are_taken_by_the_names_of_a_folder(tmp_path: Path) -> None:
    """transformers stacks a layer's experts in two parameters; senders name each expert's projections."""
    import torch
    from safetensors.torch import load_file
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from gyre.engines.reference.model import Model

    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8}
    mixture = {"num_key_value_heads": 1, "moe_intermediate_size": 8, "num_experts": 3, "num_experts_per_tok": 2}
    for name in ("held", "sent"):
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **mixture)).save_pretrained(tmp_path / name)
    model, wanted = (Model(str(tmp_path / name), torch.float32) for name in ("held", "sent"))
    sent = load_file(tmp_path / "sent" / "model.safetensors")
    model.release()
    model.resume()
    assert not model.ready and set(model.missing) == set(sent)
    model.load([(name, tensor) for name, tensor in sent.items() if "layers.1.mlp.experts.2.up_proj" not in name])
    assert model.missing == ["model.layers.1.mlp.experts.2.up_proj.weight"]
    with pytest.raises(ValueError, match="experts.3"):
        model.load([("model.layers.0.mlp.experts.3.up_proj.weight", torch.zeros(8, 16))])
    with pytest.raises(ValueError, match="has shape"):
        model.load([("model.layers.0.mlp.experts.2.up_proj.weight", torch.zeros(16, 8))])
    model.load(list(sent.items()))
    assert model.ready and model.checksum() == wanted.checksum()
    model.load_folder(str(tmp_path / "held"))
    assert model.checksum() == Model(str(tmp_path / "held"), torch.float32).checksum() != wanted.checksum()
