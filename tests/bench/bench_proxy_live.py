"""One worker's proxy with many live executions that all have a long context.

Run: `python tests/bench/bench_proxy_live.py [--executions 256] [--context 100000] [--rate 1.0] [--seconds 20]
[--realtime]`.

Every execution's conversation is brought to the context first. Then each calls at random times, `rate` times a second
on average, with a tail of about 1,000 tokens, whether or not the others' calls are done. Harnesses, proxy and engine
share the machine. Latency is counted from when a call was due; the engine's own part of it is nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import proxy_lab as lab


class Agent(NamedTuple):
    number: int
    connection: lab.Connection
    conversation: lab.Conversation

    async def call(self) -> int:
        return (await lab.timed(self.connection, self.conversation, lab.key_of(self.number)))[2]


async def fill(agents: list[Agent], context: int) -> None:
    """Bring every conversation to `context` tokens, four at a time."""
    places = asyncio.Semaphore(4)

    async def one(agent: Agent) -> None:
        async with places:
            text, at = agent.conversation.text, agent.conversation.random.randrange(1 << 20)
            characters = agent.conversation.tail * context // 900
            agent.conversation.say({"role": "user", "content": (text[at:] + text)[:characters]})
            await agent.call()

    await asyncio.gather(*map(one, agents))


async def live(agents: list[Agent], rate: float, seconds: float) -> tuple[list[float], list[float], int]:
    """Latencies of calls from when they were due, and from when they were sent; and how many failed."""
    due_latencies: list[float] = []
    latencies: list[float] = []
    errors = 0
    end = time.monotonic() + seconds

    async def one(agent: Agent) -> None:
        nonlocal errors
        pause = random.Random(agent.number)
        due = time.monotonic() + pause.expovariate(rate)
        while due < end:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            began = time.monotonic()
            try:
                await agent.call()
            except (RuntimeError, OSError, asyncio.IncompleteReadError) as error:
                print(f"execution {agent.number}: {error}")
                errors += 1
                return
            latencies.append(time.monotonic() - began)
            due_latencies.append(time.monotonic() - due)
            due += pause.expovariate(rate)

    await asyncio.gather(*map(one, agents))
    return due_latencies, latencies, errors


async def measure(told: argparse.Namespace, folder: Path, proxy: lab.Child, realtime: list[int]) -> None:
    text = lab.source_text()
    tail = int(900 * lab.characters_per_token(folder, text))
    empty = proxy.memory
    async with lab.connections(proxy.port, told.executions) as opened:
        agents = [Agent(n, c, lab.Conversation("messages", text, tail, n)) for n, c in enumerate(opened)]
        await fill(agents, told.context)
        for process in realtime:
            os.sched_setscheduler(process, os.SCHED_RR, os.sched_param(1))
        filled, cpu, began = proxy.memory, proxy.cpu, time.monotonic()
        due, sent, errors = await live(agents, told.rate, told.seconds)
        took = time.monotonic() - began
        tokens = statistics.median([await agent.call() for agent in agents[:16]])
        cpu = proxy.cpu - cpu
    print(
        f"{told.executions} executions at {tokens:.0f} tokens (median), {told.rate:g} calls a second each for "
        f"{told.seconds:g} s: {len(sent)} calls in {took:.1f} s, {errors} errors; load {lab.load_average()}"
    )
    for name, found in (("since due", sorted(due)), ("since sent", sorted(sent))):
        p50, p99 = statistics.median(found) * 1000, found[int(len(found) * 0.99)] * 1000
        print(f"  added latency {name}: p50 {p50:.1f} ms, p99 {p99:.1f} ms")
    print(f"  proxy: {cpu / took:.2f} CPUs, {cpu / len(sent) * 1000:.1f} ms a call")
    held = (proxy.memory - empty) / told.executions
    print(f"  memory: {empty:.0f} MiB, {filled:.0f} with the contexts, {proxy.memory:.0f} at the end ({held:.1f} each)")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--executions", type=int, default=256)
    parser.add_argument("--context", type=int, default=100_000)
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--realtime", action="store_true", help="as root: all else on the machine waits")
    told = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lab.make_model(folder / "model")
        with lab.child("engine", folder) as engine, lab.child("proxy", folder, engine.url, told.executions) as proxy:
            processes = [0, engine.process.pid, proxy.process.pid] if told.realtime else []
            asyncio.run(measure(told, folder, proxy, processes))


if __name__ == "__main__":
    main()
