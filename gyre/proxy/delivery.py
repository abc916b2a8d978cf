"""Sending a recorded reply, and knowing whether it arrived.

Invariant: a call is settled exactly as its delivery went, also when the client left before the reply was
ready; the reply goes out only after its row is in the shard. Sent whole means: the last byte was handed to a
connection that still stood.
"""

from __future__ import annotations

import asyncio

from aiohttp import web

from gyre.proxy.capture import Call, Capture
from gyre.proxy.exchange import Dialect, Opening, Refusal, Reply, Request

_BEGAN = web.RequestKey("began", bool)
_JSON = {"Content-Type": "application/json"}
_STREAM = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}


async def deliver(
    capture: Capture,
    call: Call,
    dialect: Dialect,
    neutral: Request,
    request: web.BaseRequest,
    keep_alive: float,
) -> web.StreamResponse:
    """Wait for the call, send its reply, settle it. Raises Refusal if it failed before anything was sent."""
    whole = False
    try:
        if neutral.stream:
            response = await _stream(call, dialect, neutral, request, keep_alive)
        else:
            reply = await asyncio.shield(call.reply)
            response = await send(request, 200, dialect.write(neutral, reply))
        whole = not _left(request)
        return response
    finally:
        # A client that left early leaves the call running: its reply waits for the retry.
        await asyncio.wait({call.reply})
        capture.settle(call, whole)


async def send(request: web.BaseRequest, status: int, body: bytes) -> web.StreamResponse:
    """Send a JSON answer, whole. Raises ConnectionError if the client is gone."""
    response = web.StreamResponse(status=status, headers=_JSON)
    response.content_length = len(body)
    await _begin(request, response)
    # A client that asked for the head alone would take a body for the next answer.
    if request.method != "HEAD":
        await _write(request, response, body)
    await response.write_eof()
    return response


async def _stream(
    call: Call, dialect: Dialect, neutral: Request, request: web.BaseRequest, keep_alive: float
) -> web.StreamResponse:
    response: web.StreamResponse | None = None
    lives = 0
    while not call.reply.done():
        await asyncio.wait({call.reply}, timeout=keep_alive)
        if not call.reply.done():
            response = response or await _open(request)
            await _write(request, response, dialect.keep_alive(neutral, _opening(call, lives)))
            lives += 1
    try:
        reply: Reply = await asyncio.shield(call.reply)
    except Refusal as refusal:
        if response is None:
            raise
        await _write(request, response, dialect.error_event(neutral, refusal, _opening(call, lives)))
        await response.write_eof()
        return response
    response = response or await _open(request)
    for event in dialect.events(neutral, reply, lives):
        await _write(request, response, event)
    await response.write_eof()
    return response


def _opening(call: Call, lives: int) -> Opening:
    return Opening(id=call.id, created=call.created, lives=lives)


async def _open(request: web.BaseRequest) -> web.StreamResponse:
    response = web.StreamResponse(headers=_STREAM)
    await _begin(request, response)
    return response


async def _begin(request: web.BaseRequest, response: web.StreamResponse) -> None:
    request[_BEGAN] = True
    await response.prepare(request)


def began(request: web.BaseRequest) -> bool:
    """Whether an answer to `request` was begun: another one would corrupt the connection."""
    return _BEGAN in request


async def _write(request: web.BaseRequest, response: web.StreamResponse, data: bytes) -> None:
    if _left(request):
        raise ConnectionResetError("the client left")
    await response.write(data)


def _left(request: web.BaseRequest) -> bool:
    return request.transport is None or request.transport.is_closing()
