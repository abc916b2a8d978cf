"""What SGLang on CPU takes: weight updates by tensor buckets and from disk, and a reply across a switch.

    PYTHONPATH=. .venv/bin/python tests/bench/bench_sglang.py [--megabytes 256] [--rounds 3]

Medians, and ratios against a reference in the same run: a load from disk for updates, the same calls without a switch
for replies. Two servers, one after the other loaded with a random Qwen3 of that size. Nothing here is a test.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp

from gyre.engines.client import EngineClient
from gyre.engines.push import push_weights
from gyre.proxy.generate import Sampled, nothing_sampled
from tests.engines.place import VOCABULARY, Oracle
from tests.sglang.server import Server, add_tokenizer, launch
from tests.sglang.test_switch import CALLS, FIRST, SECOND, Switch

BUCKETS = (16 << 20, 256 << 20)


def make_model(folder: Path, megabytes: int) -> str:
    """A random Qwen3 in fp32, of about `megabytes`, in equal layers of 67 MB."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=1024,
        num_hidden_layers=max(1, megabytes // 67),
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=4096,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    add_tokenizer(folder)
    return str(folder)


async def seconds(work: Callable[[], Awaitable[object]], rounds: int) -> float:
    """Median time of `work`."""
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        await work()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


async def updates(server: Server, rounds: int) -> None:
    oracle = Oracle(server.model)
    tensors = oracle.named()
    gigabytes = sum(tensor.numel() * tensor.element_size() for _, tensor in tensors) / 1e9
    async with aiohttp.ClientSession() as session:
        client = server.place.client(session)
        disk = await seconds(lambda: client.update_from_disk(server.model, "disk"), rounds)
        print(f"disk: {disk:.2f} s, {disk / gigabytes:.1f} s/GB of {gigabytes:.2f} GB", flush=True)
        for size in BUCKETS:

            async def push(size: int = size) -> None:
                await push_weights(client, tensors, "1.1-abcd", size)

            took = await seconds(push, rounds)
            print(
                f"tensor buckets of {size >> 20} MiB, whole push: {took:.2f} s, {took / gigabytes:.1f} s/GB, "
                f"{took / disk:.2f} times disk",
                flush=True,
            )
        await phases(client, tensors)


async def phases(client: EngineClient, tensors: list) -> None:
    """One push again, step by step."""
    steps: list[tuple[str, Callable[[], Awaitable[object]]]] = [
        ("pause (abort)", lambda: client.pause("abort")),
        ("idle", client.wait_idle),
        ("release", lambda: client.release_memory(["kv_cache", "weights"])),
        ("resume", lambda: client.resume_memory(["kv_cache", "weights"])),
        ("checksum", client.weights_checksum),
        ("flush", client.flush_cache),
        ("continue", client.resume_generation),
    ]
    for name, work in steps:
        print(f"{name}: {await seconds(work, 1):.3f} s", flush=True)


async def replies(leaves: Server, stays: Server) -> None:
    async with aiohttp.ClientSession() as session:
        switch = Switch(leaves.place, stays.place, session)
        await switch.leaves.set_version(FIRST)
        await switch.stays.set_version(SECOND)
        quiet = await calls(switch, switched=False)
        moved = await calls(switch, switched=True)
    print(f"{CALLS} calls, median reply: {quiet:.2f} s, across a switch {moved:.2f} s, {moved / quiet:.2f} times")


async def calls(switch: Switch, switched: bool) -> float:
    taken: list[float] = []

    async def timed(number: int, into: Sampled) -> None:
        began = time.perf_counter()
        await switch.call(number, into)
        taken.append(time.perf_counter() - began)

    tasks = [asyncio.create_task(timed(number, nothing_sampled())) for number in range(CALLS)]
    if switched:
        while (await switch.leaves.loads()).running < CALLS:
            await asyncio.sleep(0.01)
        for number in range(CALLS):
            switch.routes.set(f"e{number}", "stays")
        await switch.leaves.pause("abort")
    await asyncio.gather(*tasks)
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = make_model(folder / "model", options.megabytes)
        servers = [launch(folder / name, model, executions_per_cell=CALLS) for name in ("one", "two")]
        try:
            for server in servers:
                server.wait_ready()
            asyncio.run(updates(servers[0], options.rounds))
            asyncio.run(replies(*servers))
        finally:
            for server in servers:
                server.stop()


if __name__ == "__main__":
    main()
