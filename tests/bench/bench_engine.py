"""Throughput of the reference engine: `python tests/bench/bench_engine.py [--calls 64] [--rounds 5]`.

Starts one engine (one torch thread, the 0.4M-parameter model of facts/tiny_model.md with random weights) and prints
medians over rounds of concurrent calls of 100-300 prompt tokens and 40 new tokens. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import aiohttp

from gyre.engines.client import EngineClient
from gyre.engines.types import GenerateRequest, new_rid

VOCABULARY = 581
NEW_TOKENS = 40


def make_model(folder: Path) -> None:
    """Random weights in the shape of the quickstart's model."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        intermediate_size=288,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.08,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)


async def call(client: EngineClient, prompt: list[int], stream: bool) -> int:
    """One call; returns its output tokens."""
    request = GenerateRequest(
        input_ids=prompt, rid=new_rid(secrets.token_hex), max_new_tokens=NEW_TOKENS, ignore_eos=True
    )
    if not stream:
        return len((await client.generate_once(request)).output_ids)
    count = 0
    async for chunk in client.generate(request):
        count = len(chunk.output_ids)
    return count


def cpu_seconds(pid: int) -> float:
    """User and system time of a process; on a shared machine it says more than the wall clock."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(url: str, pid: int, calls: int, rounds: int, stream: bool) -> None:
    rng = random.Random(0)
    seconds: list[float] = []
    cpu: list[float] = []
    first = ""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        client = EngineClient(url, session, None, None, VOCABULARY)
        for _ in range(rounds + 1):
            sizes = [rng.randint(100, 300) for _ in range(calls)]
            prompts = [[rng.randrange(VOCABULARY) for _ in range(size)] for size in sizes]
            start, cpu_start = time.perf_counter(), cpu_seconds(pid)
            tokens = sum(await asyncio.gather(*(call(client, prompt, stream) for prompt in prompts)))
            seconds.append(time.perf_counter() - start)
            cpu.append(cpu_seconds(pid) - cpu_start)
            assert tokens == calls * NEW_TOKENS
            first = f"{sum(sizes)} prompt tokens, {tokens} new"
    middle = statistics.median(seconds[1:])
    rate = calls * NEW_TOKENS / middle
    used = statistics.median(cpu[1:])
    print(f"{calls} calls, {first}, stream={stream}: median {middle:.2f} s, {rate:.0f} new tokens/s, {used:.2f} CPU s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stream-interval", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model")
        command = [sys.executable, "-m", "gyre.engines.reference", "--model", str(folder / "model"), "--exit-on-eof"]
        command += ["--port-file", str(folder / "port"), "--stream-interval", str(args.stream_interval)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None and process.stdout is not None
        try:
            assert b"serving" in process.stdout.readline()
            url = f"http://127.0.0.1:{int((folder / 'port').read_text())}"
            for stream in (False, True):
                asyncio.run(measure(url, process.pid, args.calls, args.rounds, stream))
                asyncio.run(measure(url, process.pid, 1, args.rounds, stream))
            peak = next(
                line for line in Path(f"/proc/{process.pid}/status").read_text().splitlines() if "VmHWM" in line
            )
            print(json.dumps({"engine_peak": peak.split(":")[1].strip()}))
        finally:
            process.stdin.close()
            process.wait(timeout=30)


if __name__ == "__main__":
    main()
