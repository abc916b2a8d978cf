"""The reply time that a harness sees over a switch, against no switch: real SGLang behind gyre's proxy, on CPU.

    PYTHONPATH=. python tests/bench/bench_reply.py [--rounds 3] [--calls 8] [--prompt 400] [--tokens 120]

Two servers with the same weights, a random Qwen3 of two layers. In turn, `calls` streaming chat calls (new prompts each
time) go by HTTP to the proxy and are served (a) by the first server alone, (b) by the first until every one has half
of its tokens, when it switches away: routes move, it pauses with abort, is idle and releases its memory; the calls go
on on the second. It comes back between the rounds. Each reply is checked: all tokens that were asked for, in the
stream and in its row.

The proxy sends a reply when it is whole, and keep-alives until then: what the harness sees first is one of the two.
"Tokens' gap" is the longest time in which the proxy had no token of a call after its first.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import secrets
import socket
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import aiohttp
import numpy as np

from gyre.engines.client import EngineClient
from gyre.engines.push import push_weights
from gyre.engines.types import GenerateChunk, GenerateRequest
from gyre.ledger.turns import Turn
from gyre.ledger.turns_merge import latest_rows
from gyre.proxy.capture import Limits
from gyre.proxy.generate import Generator
from gyre.proxy.roles import rules_for
from gyre.proxy.routes import Route, Routes
from gyre.proxy.server import Proxy, ProxyExecution
from gyre.proxy.template import load
from tests.engines.place import Oracle
from tests.proxy.conftest import TINY, model_folder
from tests.sglang.server import Server, launch, make_served_model
from tests.sglang.switch import route

CONTEXT = 4096
BUCKET = 1 << 20
VERSION = "1.1-aaaa"
HEAD = 96
"""Ids of a prompt's start that tell calls apart."""


@dataclass
class Tokens:
    """What the proxy got of one call: when its chunks came, tokens so far, prompt tokens read by each engine call."""

    cells: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    count: int = 0

    @property
    def gap(self) -> float:
        return max(after - before for before, after in itertools.pairwise(self.times))


@dataclass
class Seen:
    """What the harness saw of one call, in seconds since it was sent; and what the proxy got."""

    reply: float
    first: float
    silence: float
    tokens: Tokens


class Watched:
    """An engine's client that notes when tokens come, by call."""

    def __init__(self, client: EngineClient, cell: str, into: dict[bytes, Tokens]) -> None:
        self.client, self.cell, self.into = client, cell, into

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        call = self.into.setdefault(array("i", request.input_ids[:HEAD]).tobytes(), Tokens())
        call.cells.append(self.cell)
        before, read = call.count, None
        async with contextlib.aclosing(self.client.generate(request)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                if read is None:
                    read = chunk.prompt_tokens - chunk.cached_tokens
                    call.read.append(read)
                if before + len(chunk.output_ids) > call.count:
                    call.count = before + len(chunk.output_ids)
                    call.times.append(time.perf_counter())
                yield chunk


class Lab:
    """The proxy of a worker, with executions of this module's harness, before two cells."""

    def __init__(
        self, servers: list[Server], session: aiohttp.ClientSession, folder: Path, told: argparse.Namespace
    ) -> None:
        self.session, self.told = session, told
        self.places = dict(zip(("leaves", "stays"), (server.place for server in servers), strict=True))
        self.clients = {cell: place.client(session) for cell, place in self.places.items()}
        self.tokens: dict[bytes, Tokens] = {}
        self.rows: list[Turn] = []
        self.routes = Routes()
        for cell, place in self.places.items():
            self.routes.set_serving(cell, route(place, cell, VERSION))
        renderer = load(folder, "qwen3")
        shared: dict[str, Any] = {"temperature": 1.0, "token_hex": secrets.token_hex, "now": time.time}
        # No token ends a call: each reply has as many as were asked for.
        generator = Generator(self.routes, self._engine, stop_ids=[], decode=renderer.decode, **shared)
        self.proxy = Proxy(model="m", renderer=renderer, generator=generator, sink=self, **shared)
        self.url = ""

    def _engine(self, found: Route) -> Watched:
        return Watched(self.clients[found.cell], found.cell, self.tokens)

    def append(self, turn: Turn) -> None:
        self.rows.append(turn)

    async def listen(self) -> None:
        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        sock.listen(64)
        self.url = f"http://127.0.0.1:{sock.getsockname()[1]}/v1/chat/completions"
        await self.proxy.add_listener(sock)

    async def round(self, prompts: list[str], switch: bool) -> list[Seen]:
        """One call for each prompt, at once; the first cell is as it was when they are done."""
        self.tokens.clear()
        self.rows.clear()
        keys = {f"g{number:05d}-00": secrets.token_hex(16) for number in range(len(prompts))}
        limits = Limits(context=CONTEXT, max_tokens=self.told.tokens)
        for name, key in keys.items():
            self.routes.set(name, "leaves")
            rules = rules_for("shell")
            self.proxy.register(ProxyExecution(execution=name, attempt=0, key=key, limits=limits, rules=rules))
        calls = [asyncio.create_task(self.call(key, text)) for key, text in zip(keys.values(), prompts, strict=True)]
        if switch:
            await self._half(calls)
            for name in keys:
                self.routes.set(name, "stays")
            leaves = self.clients["leaves"]
            await leaves.pause("abort")
            await leaves.wait_idle()
            await leaves.release_memory(["kv_cache", "weights"])
        seen = [await call for call in calls]
        for name, key in keys.items():
            await self.proxy.unregister(key)
            self.routes.forget(name)
        return self._checked(seen, switch)

    async def come_back(self, oracle: Oracle) -> None:
        leaves = self.clients["leaves"]
        await leaves.resume_memory(["kv_cache", "weights"])
        await push_weights(leaves, oracle.named(), VERSION, BUCKET, shared_by=self.places["leaves"].admin_key or "")

    async def _half(self, calls: list[asyncio.Task[Any]]) -> None:
        while len(self.tokens) < len(calls) or min(t.count for t in self.tokens.values()) < self.told.tokens // 2:
            for call in calls:
                if call.done():
                    raise RuntimeError(f"a call ended before the switch: {call.result()}")
            await asyncio.sleep(0.01)

    async def call(self, key: str, text: str) -> tuple[float, float, float, int]:
        """A harness's call: seconds to its end, to its first bytes, of the longest silence; tokens by its usage."""
        body = {
            "model": "m",
            "max_tokens": self.told.tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "messages": [{"role": "user", "content": text}],
        }
        times, data = [time.perf_counter()], b""
        async with self.session.post(self.url, json=body, headers={"Authorization": f"Bearer {key}"}) as answer:
            async for piece in answer.content.iter_any():
                times.append(time.perf_counter())
                data += piece
            if answer.status != 200:
                raise RuntimeError(f"HTTP {answer.status}: {data[:300]!r}")
        events = [line[6:] for line in data.splitlines() if line.startswith(b"data: {")]
        usage = next(found for event in reversed(events) if (found := json.loads(event).get("usage")))
        if not data.rstrip().endswith(b"data: [DONE]"):
            raise RuntimeError(f"a reply is not whole: {data[-300:]!r}")
        silence = max(after - before for before, after in itertools.pairwise(times))
        return times[-1] - times[0], times[1] - times[0], silence, usage["completion_tokens"]

    def _checked(self, seen: list[tuple[float, float, float, int]], switch: bool) -> list[Seen]:
        """Raises RuntimeError unless every reply is whole and was served where it should be."""
        wanted = [self.told.tokens] * self.told.calls
        rows = latest_rows(self.rows)
        if [one[3] for one in seen] != wanted or [len(row.output) for row in rows] != wanted:
            raise RuntimeError(f"of {wanted}: {[one[3] for one in seen]}, {[len(row.output) for row in rows]}")
        cells = ["leaves", "stays"] if switch else ["leaves"]
        if any(call.cells != cells for call in self.tokens.values()):
            raise RuntimeError(f"served by {[call.cells for call in self.tokens.values()]}")
        pairs = zip(seen, self.tokens.values(), strict=True)
        return [Seen(one[0], one[1], one[2], call) for one, call in pairs]


def prompts(number: int, told: argparse.Namespace) -> list[str]:
    """Random words: no round finds another's prefix."""
    letters = np.random.default_rng(number).integers(97, 123, (told.calls, told.prompt), dtype=np.uint8)
    return [row.tobytes().decode() for row in letters]


def report(found: dict[str, list[Seen]], told: argparse.Namespace) -> None:
    load_average = " ".join(f"{value:.1f}" for value in os.getloadavg())
    print(
        f"{told.rounds} rounds of {told.calls} calls, prompts of {told.prompt} characters, {told.tokens} tokens; "
        f"load {load_average}; all {2 * told.rounds * told.calls} replies whole"
    )
    print(f"{'median (worst), s':<20}{'no switch':>18}{'switch':>18}{'ratio of medians':>20}")
    for name, of in (
        ("reply", lambda one: one.reply),
        ("first bytes", lambda one: one.first),
        ("longest silence", lambda one: one.silence),
        ("tokens' gap", lambda one: one.tokens.gap),
    ):
        values = {way: [of(one) for one in calls] for way, calls in found.items()}
        middles = {way: statistics.median(each) for way, each in values.items()}
        cells = "".join(f"{f'{middles[way]:.2f} ({max(values[way]):.2f})':>18}" for way in values)
        print(f"{name:<20}{cells}{middles['switch'] / middles['no switch']:>20.2f}")
    again = [one.tokens.read[1] for one in found["switch"]]
    print(f"tokens read again for a call that went on: median {statistics.median(again):.0f}, worst {max(again)}")


async def measure(servers: list[Server], model: str, folder: Path, told: argparse.Namespace) -> None:
    oracle = Oracle(model)
    found: dict[str, list[Seen]] = {"no switch": [], "switch": []}
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        lab = Lab(servers, session, folder, told)
        await lab.listen()
        for client in lab.clients.values():
            await push_weights(client, oracle.named(), VERSION, BUCKET)
        numbers = itertools.count()
        for number in range(told.rounds + 1):
            for way, into in found.items():
                seen = await lab.round(prompts(next(numbers), told), switch=way == "switch")
                if way == "switch":
                    await lab.come_back(oracle)
                print(f"round {number}, {way}: {max(one.reply for one in seen):.1f} s", file=sys.stderr)
                if number:  # the first of each warms up
                    into.extend(seen)
        await lab.proxy.close()
    report(found, told)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calls", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=400, help="characters")
    parser.add_argument("--tokens", type=int, default=120)
    told = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_served_model(folder / "model", seed=0)
        rendered = model_folder(folder / "rendered", TINY.read_text())
        settings: dict[str, Any] = {"context": CONTEXT, "executions_per_cell": told.calls}
        servers: list[Server] = []
        try:
            for cell in ("leaves", "stays"):
                servers.append(launch(folder / cell, model, **settings))
            for server in servers:
                server.wait_ready()
            asyncio.run(measure(servers, model, rendered, told))
        finally:
            for server in servers:
                server.stop()


if __name__ == "__main__":
    main()
