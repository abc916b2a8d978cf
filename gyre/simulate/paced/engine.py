"""A paced engine: SGLang's routes, and time instead of arithmetic.

Owns the calls in hand of one cell's engine. Invariants: as with a real engine, a call that is aborted ends with what it
has said so far, nothing is said while the engine is paused, and memory is released only when nothing runs.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from typing import Any

import aiohttp
from aiohttp import web

from gyre.engines.client import EngineClient
from gyre.engines.launch import write_keys
from gyre.engines.reference.auth import Keys, middleware
from gyre.processes.address import node_address
from gyre.processes.engine_child import EngineChild
from gyre.simulate.paced.pace import Answer, Script

LOGPROB = -0.5
MANAGEMENT = (
    "/pause_generation",
    "/continue_generation",
    "/update_weight_version",
    "/release_memory_occupation",
    "/resume_memory_occupation",
)


class PacedServer:
    """The application."""

    def __init__(self, script: Script, keys: Keys) -> None:
        self.script = script
        self.version = "default"
        self._going = asyncio.Event()
        self._going.set()
        self._cut = asyncio.Event()
        """Set for the calls that run now when they are aborted; each pause makes another."""
        self._live = 0
        self.app = web.Application(middlewares=[middleware(keys, frozenset(MANAGEMENT))])
        for path in MANAGEMENT:
            self.app.router.add_post(path, getattr(self, "_" + path.strip("/")))
        self.app.router.add_post("/generate", self._generate)
        self.app.router.add_get("/health", lambda request: _done())
        self.app.router.add_get("/v1/loads", self._loads)
        for path in ("/model_info", "/server_info"):
            self.app.router.add_get(path, self._info)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        await self._going.wait()
        self._live += 1
        try:
            answer, prompt = self.script.answer(body["input_ids"]), len(body["input_ids"])
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await response.write(self._event(answer.head, prompt, None))
            said, finish = await self._speak(answer)
            await response.write(self._event(said, prompt, finish) + b"data: [DONE]\n\n")
            await response.write_eof()
            return response
        finally:
            self._live -= 1

    async def _speak(self, answer: Answer) -> tuple[list[int], dict[str, Any]]:
        began = time.monotonic()
        try:
            await asyncio.wait_for(self._cut.wait(), answer.seconds)
        except TimeoutError:
            return answer.after(1.0), {"type": "stop", "matched": self.script.ending}
        share = (time.monotonic() - began) / answer.seconds if answer.seconds else 0.0
        return answer.after(min(share, 0.999)), {"type": "abort", "message": "Aborted"}

    def _event(self, ids: list[int], prompt: int, finish: dict[str, Any] | None) -> bytes:
        meta = {
            "finish_reason": finish,
            "prompt_tokens": prompt,
            "weight_version": self.version,
            "output_token_logprobs": [[LOGPROB, token, None] for token in ids],
        }
        return b"data: " + json.dumps({"output_ids": ids, "meta_info": meta}).encode() + b"\n\n"

    async def _pause_generation(self, request: web.Request) -> web.Response:
        self._going.clear()
        self._cut.set()
        self._cut = asyncio.Event()
        return await _done()

    async def _continue_generation(self, request: web.Request) -> web.Response:
        self._going.set()
        return await _done()

    async def _update_weight_version(self, request: web.Request) -> web.Response:
        self.version = str(json.loads(await request.read())["new_version"])
        return await _done()

    async def _release_memory_occupation(self, request: web.Request) -> web.Response:
        if self._live:
            return web.json_response({"error": {"message": "the server is busy"}}, status=400)
        return await _done()

    async def _resume_memory_occupation(self, request: web.Request) -> web.Response:
        return await _done()

    async def _loads(self, request: web.Request) -> web.Response:
        return web.json_response({"loads": [{"num_running_reqs": self._live}]})

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": "paced", "weight_version": self.version})


async def _done() -> web.Response:
    return web.json_response({"success": True})


class PacedEngine(EngineChild):
    """As its lead sees it: an engine of the cell, that lives in the lead's own process."""

    def __init__(self, *about: Any, script: Script) -> None:
        super().__init__(*about)
        self.script = script
        self._runner: web.AppRunner | None = None

    @property
    def running(self) -> bool:
        return self._runner is not None

    async def start(self) -> None:
        await self.close()
        self.key_file = f"{self.name}.{secrets.token_hex(4)}"
        keys = write_keys(self.run.keys / self.key_file)
        self._runner = web.AppRunner(PacedServer(self.script, Keys(**keys)).app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, node_address(), 0, shutdown_timeout=0.0)
        await site.start()
        self.url = f"http://{node_address()}:{self._runner.addresses[0][1]}"
        self._session = aiohttp.ClientSession()
        self._client = EngineClient(self.url, self._session, keys["api_key"], keys["admin_key"], None)
        self.released = False

    async def close(self) -> None:
        await super().close()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
