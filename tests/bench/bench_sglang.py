"""Real SGLang on this machine: weight updates by tensor buckets, by Mooncake and by disk, a switch by phases, its KV.

    PYTHONPATH=. python tests/bench/bench_sglang.py [--rounds 5]

Two servers on CPU share a store of KV pages. Weights: a random Qwen3 of about 100 M bytes, pushed in buckets of shared
memory, in buckets that are sent, written into the engine's memory by Mooncake, and loaded from disk, in turn. A switch:
calls with long prompts are cut on one server and go on on the other, with what the store has, and under a salt of their
own, which is what a cell without a store finds.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import numpy as np
import torch

from gyre.engines.client import EngineClient
from gyre.engines.push import push_weights
from gyre.engines.sglang.arguments import Store
from gyre.engines.sglang.store import free_port, master_arguments
from gyre.engines.types import GenerateRequest, Generation, new_rid
from gyre.processes.placing import Placing
from tests.engines.place import SHAPE, Oracle
from tests.sglang.server import Server, add_tokenizer, launch

CALLS, PROMPT, CUT = 4, 3000, 64
VERSION = "1.1-aaaa"
BUCKET = 256 << 20
WIDE = {**SHAPE, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "head_dim": 64}


def make_wide_model(folder: Path) -> str:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**WIDE, tie_word_embeddings=True)).save_pretrained(folder)
    add_tokenizer(folder)
    return str(folder)


async def timed(work: Callable[[], Awaitable[object]]) -> float:
    began = time.perf_counter()
    await work()
    return time.perf_counter() - began


async def updates(client: EngineClient, key: str, oracle: Oracle, model: str, rounds: int) -> None:
    named = oracle.named()
    gigabytes = sum(tensor.nbytes for _, tensor in named) / 1e9

    async def written(version: str) -> str:
        with Placing("127.0.0.1", Path(model), 1, torch.float32) as placing:
            return await push_weights(client, named, version, BUCKET, carrier=placing)

    ways: dict[str, Callable[[str], Awaitable[object]]] = {
        "shared memory": lambda version: push_weights(client, named, version, BUCKET, shared_by=key),
        "sent": lambda version: push_weights(client, named, version, BUCKET),
        "mooncake": written,
        "disk": lambda version: client.update_from_disk(model, version),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            took = await timed(lambda n=number, way=way: way(f"1.{n}-weights"))  # type: ignore[misc]
            if number:  # the first of each warms up
                seconds[name].append(took)
    print(f"\nweight update of {gigabytes * 1e3:.0f} MB, median of {rounds}")
    for name, found in seconds.items():
        middle = statistics.median(found)
        print(f"  {name:<16} {middle:6.2f} s   {middle / gigabytes:6.1f} s a GB")


def request(prompt: list[int], count: int, salt: str) -> GenerateRequest:
    rid = new_rid(secrets.token_hex)
    return GenerateRequest(input_ids=prompt, rid=rid, max_new_tokens=count, ignore_eos=True, cache_salt=salt)


async def cut(client: EngineClient, prompt: list[int], tokens: int) -> list[int]:
    """The prompt and what was sampled, once the call was left after `tokens`."""
    got: list[int] = []
    stream = client.generate(request(prompt, 1000, VERSION))
    async for chunk in stream:
        got = chunk.output_ids
        if len(got) >= tokens:
            break
    await stream.aclose()  # type: ignore[attr-defined]
    return prompt + got


async def switches(leaves: EngineClient, stays: EngineClient, key: str, oracle: Oracle, rounds: int) -> None:
    phases: dict[str, list[float]] = {}
    read: dict[str, list[int]] = {"with the store": [], "without": []}
    first: dict[str, list[float]] = {"with the store": [], "without": []}
    total = 0
    for client in (leaves, stays):
        await push_weights(client, oracle.named(), VERSION, BUCKET)
    for number in range(rounds):
        prompts = np.random.default_rng(number).integers(0, 600, (CALLS, PROMPT)).tolist()
        whole = await asyncio.gather(*(cut(leaves, prompt, CUT) for prompt in prompts))
        steps: list[tuple[str, Callable[[], Awaitable[object]]]] = [
            ("pause, abort", lambda: leaves.pause("abort")),
            ("idle", leaves.wait_idle),
            ("release", lambda: leaves.release_memory(["kv_cache", "weights"])),
        ]
        for name, step in steps:
            phases.setdefault(name, []).append(await timed(step))
        for name, salt in (("with the store", VERSION), ("without", f"none-{number}")):
            began = time.perf_counter()
            done: list[Generation] = await asyncio.gather(
                *(stays.generate_once(request(ids, 1, salt)) for ids in whole)
            )
            first[name].append(time.perf_counter() - began)
            read[name].append(sum(one.prompt_tokens - one.cached_tokens for one in done))
        total += sum(len(ids) for ids in whole)
        phases.setdefault("resume", []).append(await timed(lambda: leaves.resume_memory(["kv_cache", "weights"])))
        pushed = await timed(lambda: push_weights(leaves, oracle.named(), VERSION, BUCKET, shared_by=key))
        phases.setdefault("push, checksum", []).append(pushed)
    print(f"\na switch, median of {rounds}")
    for name, found in phases.items():
        print(f"  {name:<16} {statistics.median(found):6.2f} s")
    print(f"\n{CALLS} calls of {PROMPT} + {CUT} tokens that go on on the other server, {rounds} times")
    for name, counts in read.items():
        middle = statistics.median(first[name])
        share = 1 - sum(counts) / total
        print(f"  {name:<16} hit {share:6.1%}   read again {sum(counts):6d}   first token {middle:5.2f} s")


async def measure(one: Server, other: Server, oracle: Oracle, model: str, rounds: int) -> None:
    async with aiohttp.ClientSession() as session:
        first, second = one.place.client(session), other.place.client(session)
        key = one.place.admin_key or ""
        await updates(first, key, oracle, model, rounds)
        await switches(first, second, key, oracle, rounds)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_wide_model(folder / "model")
        port = free_port("127.0.0.1")
        master = subprocess.Popen(
            master_arguments("127.0.0.1", port, free_port("127.0.0.1")),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        store = Store(f"127.0.0.1:{port}", "bench")
        made: list[Server] = []
        try:
            made = [launch(folder / name, model, store=store, store_mb=2048, weights="mooncake") for name in "ab"]
            for server in made:
                server.wait_ready()
            asyncio.run(measure(made[0], made[1], Oracle(model), model, options.rounds))
        finally:
            for server in made:
                server.stop()
            master.kill()
            master.wait()


if __name__ == "__main__":
    main()
