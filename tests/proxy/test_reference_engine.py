"""The proxy against the reference engine and real shards: exact log-probabilities, also of a call that was cut."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from gyre.engines.client import EngineClient
from gyre.proxy.capture import Limits

V1 = "1.1-0123456789abcdef"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory):
    """URL of a reference engine on a random model with a vocabulary somewhat larger than the tokenizer's."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder: Path = tmp_path_factory.mktemp("engine")
    torch.manual_seed(0)
    shape = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen3Config(vocab_size=420, head_dim=16, intermediate_size=96, max_position_embeddings=4096, **shape)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    (folder / "keys").write_text(json.dumps({"api_key": "api", "admin_key": "admin"}))
    (folder / "keys").chmod(0o600)
    port_file = folder / "port"
    told = ["--model", str(folder), "--port-file", str(port_file), "--key-file", str(folder / "keys")]
    process = subprocess.Popen(
        [sys.executable, "-m", "gyre.engines.reference", *told, "--weight-version", V1, "--exit-on-eof"],
        stdin=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    try:
        while not port_file.exists():
            assert process.poll() is None
            try:
                process.wait(0.1)
            except subprocess.TimeoutExpired:
                continue
        yield f"http://127.0.0.1:{port_file.read_text().strip()}"
    finally:
        process.stdin.close()
        process.wait(30)


async def test_recorded_logprobs_are_exact_and_a_cut_call_goes_on(new_world, renderer, engine):
    async with aiohttp.ClientSession() as session:
        client = EngineClient(engine, session, "api", "admin", 420)
        limits = Limits(context=2000, max_tokens=400)
        world = new_world(renderer, limits, engines=lambda route: client, temperature=1.0)
        world.url = await world.listen()
        messages = [{"role": "user", "content": "List the files."}]
        for turn in range(2):
            call = asyncio.ensure_future(world.post({"messages": messages, "max_tokens": 400}))
            while not call.done() and (await client.loads()).running == 0:
                await asyncio.sleep(0.005)
            await client.abort_all()
            status, answer = await call
            assert status == 200
            row = world.sink.rows[turn]
            whole = world.whole(turn)
            scores = await client.score(whole)
            expected = scores[len(whole) - len(row.output) - 1 :]
            assert max(abs(a - b) for a, b in zip(row.logprobs, expected, strict=True)) < 1e-4
            assert [(span.lineage, span.version) for span in row.spans] == [(1, 1)]
            messages += [{"role": "assistant", "content": answer["choices"][0]["message"]["content"]}]
            messages += [{"role": "user", "content": "Go on."}]
        first, second = world.sink.rows
        assert (second.parent, second.keep) == (0, len(first.context) + len(first.output))
        await world.proxy.close()
