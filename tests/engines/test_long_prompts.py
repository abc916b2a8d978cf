"""A prompt of megabytes reaches the engine whole, with its length told beforehand."""

from __future__ import annotations

import json
from array import array
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.test_utils import RawTestServer

from gyre.engines.client import EngineClient
from gyre.engines.types import GenerateRequest

REPLY = {
    "output_ids": [7],
    "meta_info": {"output_token_logprobs": [[-0.5, 7, None]], "finish_reason": {"type": "stop"}, "weight_version": "v"},
}


async def test_a_long_prompt_arrives_whole() -> None:
    seen: list[tuple[dict[str, str], Any]] = []

    async def answer(request: web.BaseRequest) -> web.Response:
        seen.append((dict(request.headers), json.loads(await request.content.read())))
        return web.Response(body=b"data: " + json.dumps(REPLY).encode() + b"\n\ndata: [DONE]\n\n")

    async with RawTestServer(answer, host="127.0.0.1") as server, aiohttp.ClientSession() as session:
        client = EngineClient(str(server.make_url("")), session, "k")
        for length in (3, 300_000):
            ids = array("i", (number % 150_000 for number in range(length)))
            request = GenerateRequest(input_ids=ids, rid="0" * 32, max_new_tokens=5)
            chunks = [chunk async for chunk in client.generate(request)]
            assert chunks[-1].output_ids == [7]
            headers, body = seen.pop()
            assert body["input_ids"] == ids.tolist()
            assert (body["rid"], body["stream"]) == (request.rid, True)
            assert "Transfer-Encoding" not in headers and int(headers["Content-Length"]) > 2 * length
