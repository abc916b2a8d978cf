"""A small tokenizer, a scripted engine and a running proxy, for all tests of this room."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import secrets
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from gyre.engines.errors import EngineUnavailable
from gyre.engines.types import GenerateChunk, GenerateRequest, Generation
from gyre.ledger.routing import Mixture, Routing
from gyre.ledger.turns import Turn
from gyre.ledger.turns_merge import latest_rows
from gyre.proxy.capture import Limits
from gyre.proxy.generate import Generator
from gyre.proxy.roles import rules_for
from gyre.proxy.routes import Route, Routes
from gyre.proxy.server import Proxy, ProxyExecution
from gyre.proxy.template import Renderer, load

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    # For `recipes`.
    sys.path.insert(0, str(ROOT))

TINY = ROOT / "recipes" / "tiny_model" / "chat_template.jinja"
THINKING, CODER, LLAMA = (Path(__file__).with_name(f"{name}.jinja") for name in ("thinking", "coder", "llama"))
FAMILIES = {"coder": "qwen3-coder", "qwen3.5": "qwen3.5", "llama": "llama3"}
"""Model folder -> its template family, where that is not qwen3."""
LLAMA_TOKENS = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"]
KEY = "a-key-of-one-execution"
V1, V2 = "1.1-0123456789abcdef", "1.2-fedcba9876543210"


def small_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *LLAMA_TOKENS]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = ['assistant user system bash command "arguments": {"name": the files are here', "ls -la && cat a.txt"]
    tokenizer.train_from_iterator(corpus * 4, trainer)
    markers = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in markers])
    return tokenizer


def model_folder(folder: Path, template: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    small_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model folders: tiny (no thinking), hybrid (the model opens <think>), thinking (the prompt opens it), and one for
    each other family.
    """
    root = tmp_path_factory.mktemp("models")
    thinking = THINKING.read_text()
    return {
        "tiny": model_folder(root / "tiny", TINY.read_text()),
        "hybrid": model_folder(root / "hybrid", "{%- set opening = '' -%}" + thinking),
        "thinking": model_folder(root / "thinking", "{%- set opening = '<think>\\n' -%}" + thinking),
        "coder": model_folder(root / "coder", CODER.read_text()),
        "qwen3.5": model_folder(root / "qwen3.5", "{%- set strict = true -%}" + CODER.read_text()),
        "llama": model_folder(root / "llama", LLAMA.read_text()),
    }


@pytest.fixture(scope="session")
def renderers(folders: dict[str, Path]) -> dict[str, Renderer]:
    return {n: load(folder, FAMILIES.get(n, "qwen3"), nonce="test-nonce") for n, folder in folders.items()}


@pytest.fixture(scope="session")
def renderer(renderers: dict[str, Renderer]) -> Renderer:
    return renderers["tiny"]


class Script:
    """What the fake engine does on its next call: reply with `text`, in chunks, unless it is told to fail.

    cut: abort after so many tokens; crash: lose the connection after so many; version: what the engine reports;
    gate: wait for it before the reply; chunk: tokens a chunk; spoil: what it says of experts, made from what is right.
    """

    def __init__(self, text: str, **told: Any) -> None:
        self.text = text
        self.cut: int | None = told.pop("cut", None)
        self.crash: int | None = told.pop("crash", None)
        self.version: str | None = told.pop("version", None)
        self.gate: asyncio.Event | None = told.pop("gate", None)
        self.chunk: int = told.pop("chunk", 3)
        self.stop: bool = told.pop("stop", True)
        self.error: Exception | None = told.pop("error", None)
        self.spoil: Callable[[np.ndarray], np.ndarray] | None = told.pop("spoil", None)
        assert not told


MIXTURE = Mixture(layers=2, experts=300, chosen=3)


def experts_of(ids: Sequence[int], start: int) -> np.ndarray:
    """[positions, layers, chosen]: the experts of all positions from `start` to the last but one. Each position's are
    its own: they follow from its number and its token."""
    places = np.arange(start, len(ids) - 1)[:, None, None]
    tokens = np.asarray(ids[start:-1], dtype=np.int64)[:, None, None]
    layers, chosen = np.arange(MIXTURE.layers)[:, None], np.arange(MIXTURE.chosen)
    return ((places * 7 + tokens * 31 + layers * 101 + chosen) % MIXTURE.experts).astype(np.int32)


class FakeEngine:
    """Keeps the shapes of EngineClient.generate: cumulative chunks, partial output on abort, one version a chunk."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self.scripts: list[Script] = []
        self.requests: list[GenerateRequest] = []
        self.routes: list[Route] = []
        self.given: list[list[int]] = []
        """Ids that each call sampled, if its consumer took them all."""
        self.closed_early = 0
        self.started = asyncio.Event()

    def say(self, text: str, **told: Any) -> None:
        self.scripts.append(Script(text, **told))

    def at(self, route: Route) -> _At:
        return _At(self, route)


class _At:
    def __init__(self, engine: FakeEngine, route: Route) -> None:
        self.engine, self.route = engine, route

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        engine = self.engine
        request = msgspec.structs.replace(request, input_ids=list(request.input_ids))
        engine.requests.append(request)
        engine.routes.append(self.route)
        engine.started.set()
        assert request.cache_salt == self.route.weight_version
        script = engine.scripts.pop(0) if engine.scripts else Script("done")
        if script.gate is not None:
            await script.gate.wait()
        if script.error is not None:
            raise script.error
        ids = engine.renderer.encode(script.text)
        if script.stop:
            ids.append(engine.renderer.end_id)
        finish = "stop" if script.stop and len(ids) <= request.max_new_tokens else "length"
        ids = ids[: request.max_new_tokens]
        version = script.version or self.route.weight_version
        end = len(ids) if script.cut is None else script.cut
        if script.crash is not None:
            end = script.crash
        engine.given.append(ids[:end])
        finished = False
        try:
            for sent in range(script.chunk, end, script.chunk):
                yield GenerateChunk(**self._fields(ids[:sent], version, request))
                await asyncio.sleep(0)
            if script.crash is not None:
                if end:
                    yield GenerateChunk(**self._fields(ids[:end], version, request))
                finished = True
                raise EngineUnavailable("connection lost")
            finished = True
            yield Generation(
                **self._fields(ids[:end], version, request),
                finish="abort" if script.cut is not None else finish,
                routed_experts=self._experts(ids[:end], request, script) if request.return_routed_experts else None,
            )
        finally:
            engine.closed_early += not finished

    def _experts(self, ids: list[int], request: GenerateRequest, script: Script) -> str:
        assert request.routed_experts_start <= len(request.input_ids), "SGLang aborts such a request"
        found = experts_of([*request.input_ids, *ids], request.routed_experts_start)
        return base64.b64encode((script.spoil(found) if script.spoil else found).tobytes()).decode()

    def _fields(self, ids: list[int], version: str, request: GenerateRequest) -> dict[str, Any]:
        return {
            "output_ids": ids,
            "logprobs": [-0.5 - i / 64 for i in range(len(ids))],
            "versions": [(version, len(ids))] if ids else [],
            "prompt_tokens": len(request.input_ids),
            "cached_tokens": 7,
        }


class Sink:
    """Rows in memory. `full`: the disk is full."""

    def __init__(self) -> None:
        self.rows: list[Turn] = []
        self.full = False

    def append(self, turn: Turn) -> None:
        if self.full:
            raise OSError(28, "No space left on device")
        self.rows.append(turn)


class RoutingSink:
    """Records of experts in memory, with how many turns there were before each."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.records: list[tuple[int, Routing]] = []

    def append(self, routing: Routing) -> None:
        if self.sink.full:
            raise OSError(28, "No space left on device")
        self.records.append((len(self.sink.rows), routing))


class World:
    """A proxy on loopback with one registered execution."""

    def __init__(
        self,
        renderer: Renderer,
        limits: Limits,
        keep_alive: float = 30.0,
        engines: Callable[[Route], Any] | None = None,
        temperature: float = 0.8,
        harness: str = "shell",
        mixture: Mixture | None = None,
    ) -> None:
        self.renderer = renderer
        self.rules = rules_for(harness)
        self.engine = FakeEngine(renderer)
        self.sink = Sink()
        self.routing = RoutingSink(self.sink)
        self.routes = Routes()
        clock = itertools.count(1000)
        generator = Generator(
            self.routes,
            engines or self.engine.at,
            temperature=temperature,
            stop_ids=renderer.stop_ids,
            decode=renderer.decode,
            token_hex=secrets.token_hex,
            now=lambda: float(next(clock)),
            fruitless=3,
            patience=0.001,
            mixture=mixture,
        )
        self.proxy = Proxy(
            model="tiny",
            renderer=renderer,
            generator=generator,
            sink=self.sink,
            routing=self.routing,
            temperature=temperature,
            token_hex=secrets.token_hex,
            now=lambda: float(next(clock)),
            keep_alive=keep_alive,
        )
        self.limits = limits
        self.capture = self.proxy.register(self.told("g00001-00", KEY))
        self.serve("cell-0", V1)
        self.routes.set("g00001-00", "cell-0")
        self.url = ""

    def told(self, execution: str, key: str) -> ProxyExecution:
        return ProxyExecution(execution=execution, attempt=0, key=key, limits=self.limits, rules=self.rules)

    def serve(self, cell: str, version: str | None) -> None:
        serving = [Route(url=f"http://{cell}", key="engine-key", weight_version=version, cell=cell)] if version else []
        self.routes.set_serving(cell, *serving)

    async def listen(self, key: str | None = None) -> str:
        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        sock.listen(16)
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        await self.proxy.add_listener(sock, key)
        return url

    def client(self, key: str = KEY, url: str = "") -> AsyncOpenAI:
        return AsyncOpenAI(base_url=(url or self.url) + "/v1", api_key=key, max_retries=0, timeout=20)

    def anthropic(self, key: str = KEY, **headers: str) -> AsyncAnthropic:
        return AsyncAnthropic(base_url=self.url, api_key=key, max_retries=0, timeout=20, default_headers=headers)

    async def post(
        self, body: Any, key: str = KEY, path: str = "/v1/chat/completions", **headers: str
    ) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        whole = {"Authorization": f"Bearer {key}", **headers}
        async with aiohttp.ClientSession() as session:
            async with session.post(self.url + path, data=data, headers=whole) as answer:
                return answer.status, await answer.json()

    def sent(self, index: int = -1) -> list[int]:
        """Ids that the engine was asked with."""
        return self.engine.requests[index].input_ids

    def whole(self, number: int, keep: int | None = None) -> list[int]:
        """The whole sequence of a turn, from rows alone."""
        row = {row.turn: row for row in latest_rows(self.sink.rows)}[number]
        before = self.whole(row.parent)[: row.keep] if row.parent >= 0 else []
        return before + row.context + row.output


@pytest.fixture(scope="session")
def new_world() -> type[World]:
    """The class, for tests that bring their own event loop or engine."""
    return World


@pytest.fixture
async def worlds() -> AsyncIterator[Callable[..., Any]]:
    """Makes worlds that are closed at the end."""
    made: list[World] = []

    async def make(
        renderer: Renderer,
        keep_alive: float = 30.0,
        harness: str = "shell",
        mixture: Mixture | None = None,
        **limits: Any,
    ) -> World:
        bounds = {"context": 2000, "max_tokens": 300, "call_seconds": 15.0, **limits}
        world = World(renderer, Limits(**bounds), keep_alive, harness=harness, mixture=mixture)
        world.url = await world.listen()
        made.append(world)
        return world

    yield make
    for world in made:
        await world.proxy.close()


@pytest.fixture
async def world(worlds: Callable[..., Any], renderer: Renderer) -> World:
    return await worlds(renderer)
