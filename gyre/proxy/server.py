"""The proxy of one worker: listeners, keys, and the way of a request through dialect and capture.

Invariant: only what arrives through an execution's own listener, with that execution's own key, is served;
whatever a client sends, the answer is the dialect's reply or the dialect's error.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import socket
from collections.abc import Callable
from functools import partial

import msgspec
from aiohttp import web

from gyre.engines.types import TokenHex
from gyre.proxy.capture import Capture, Limits, Stats, TurnSink
from gyre.proxy.delivery import began, deliver, send
from gyre.proxy.dialects import DIALECTS, dialect_of
from gyre.proxy.exchange import Dialect, Refusal, ThreadRules
from gyre.proxy.generate import Generator
from gyre.proxy.template import Renderer

log = logging.getLogger(__name__)

_PREFIX = re.compile(r"/s/([^/]+)(/.*)")
_MODELS = ("/v1/models", "/models")
_KEY_LENGTH = 16
_LINGER = 0.05
_READ_BYTES = 1 << 20
"""A body is read in pieces of up to this: histories have megabytes."""


class ProxyExecution(msgspec.Struct, frozen=True, kw_only=True):
    """An execution to serve. `key` is random, at least 16 characters; it is in no log and no error."""

    execution: str
    attempt: int
    key: str
    limits: Limits
    rules: ThreadRules

    @property
    def path(self) -> str:
        """The id that a base URL may carry as /s/<id>: a cross-check of the key."""
        return f"{self.execution}.{self.attempt}"

    def __repr__(self) -> str:
        return f"ProxyExecution({self.path!r})"


class _Live:
    """A registered execution."""

    def __init__(self, told: ProxyExecution, capture: Capture) -> None:
        self.told = told
        self.capture = capture


class Proxy:
    """Serves live executions; everything runs in one event loop.

    `model`: the one name that /v1/models lists. `keep_alive`: seconds of silence after which a streaming
    reply that is not ready begins with events that say nothing. `now`: seconds since the epoch, for display.
    """

    def __init__(
        self,
        *,
        model: str,
        renderer: Renderer,
        generator: Generator,
        sink: TurnSink,
        temperature: float,
        token_hex: TokenHex,
        now: Callable[[], float],
        keep_alive: float = 10.0,
    ) -> None:
        self._model, self._renderer, self._generator, self._sink = model, renderer, generator, sink
        self._temperature, self._token_hex, self._now = temperature, token_hex, now
        self._keep_alive = keep_alive
        self._live: dict[str, _Live] = {}
        self._paused: dict[str, _Live] = {}
        self._listeners: dict[socket.socket, tuple[asyncio.Server, web.Server]] = {}

    # -- executions

    def register(self, told: ProxyExecution) -> Capture:
        """Serve `told` to whoever has its key. Gives its capture, whose `stats` are live."""
        if len(told.key) < _KEY_LENGTH or told.key in {*self._live, *self._paused}:
            raise ValueError(f"{told.path}: an execution needs a key of its own, {_KEY_LENGTH} characters or more")
        capture = Capture(
            execution=told.execution,
            attempt=told.attempt,
            renderer=self._renderer,
            generator=self._generator,
            sink=self._sink,
            rules=told.rules,
            limits=told.limits,
            temperature=self._temperature,
            model=self._model,
            token_hex=self._token_hex,
            now=self._now,
        )
        self._live[told.key] = _Live(told, capture)
        return capture

    async def pause(self, key: str) -> None:
        """Serve this key no more until `resume`; calls in flight are cut and counted (`stats.dangling`)."""
        self._paused[key] = self._live.pop(key)
        await self._paused[key].capture.cut()

    def resume(self, key: str) -> None:
        """Serve a key again, if it was paused: the execution goes on with another session."""
        if key in self._paused:
            self._live[key] = self._paused.pop(key)

    async def unregister(self, key: str) -> Stats:
        """Stop serving; calls in flight are cut and counted (`stats.dangling`)."""
        live = self._paused.pop(key, None) or self._live.pop(key)
        return await live.capture.cut()

    # -- listeners

    async def add_listener(self, sock: socket.socket, key: str | None = None) -> None:
        """Serve on a listening socket, which is ours from now on. With `key`, only that execution is served
        through it.
        """
        sock.setblocking(False)
        server = web.Server(partial(self._answer, key), access_log=None, read_bufsize=_READ_BYTES)
        self._listeners[sock] = (await asyncio.get_running_loop().create_server(server, sock=sock), server)

    async def remove_listener(self, sock: socket.socket) -> None:
        """Close a listening socket and its connections."""
        listening, server = self._listeners.pop(sock)
        listening.close()
        # Idle connections close at once; a handler that still runs gets a moment (0 would mean for ever).
        server.pre_shutdown()
        await server.shutdown(timeout=_LINGER)

    async def close(self) -> None:
        """End every execution and close every listener."""
        for key in [*self._live, *self._paused]:
            await self.unregister(key)
        for sock in list(self._listeners):
            await self.remove_listener(sock)

    # -- requests

    async def _answer(self, listener_key: str | None, request: web.BaseRequest) -> web.StreamResponse:
        path_id, path = _split(request.path)
        dialect = dialect_of(path, request.headers)
        live: _Live | None = None
        try:
            live = self._authorise(listener_key, request, path_id)
            if path in _MODELS and request.method == "GET":
                return await send(request, 200, dialect.models([self._model]))
            if path not in DIALECTS or request.method != "POST":
                raise Refusal("not_found", f"{request.method} {path} is not served here")
            return await self._call(live.capture, dialect, path, request)
        except Refusal as refusal:
            return await self._refuse(live, dialect, request, refusal)
        except ConnectionError:
            # The client left; its call, if any, was settled by `deliver`.
            raise
        except Exception as error:
            # A defect of ours must not look like the model's: answer 5xx, flag the execution, keep the traceback.
            log.exception("proxy: %s %s", request.method, path)
            if live is not None:
                live.capture.flag(error)
            if began(request):
                raise
            return await self._refuse(live, dialect, request, Refusal("server", "internal error"))

    async def _call(
        self, capture: Capture, dialect: Dialect, path: str, request: web.BaseRequest
    ) -> web.StreamResponse:
        body = await _body(request, capture.limits.body_bytes)
        neutral = dialect.read(body, capture.histories)
        if path in dialect.counting:
            return await send(request, 200, dialect.count(capture.count(neutral, request.headers)))
        call = capture.begin(neutral, request.headers)
        return await deliver(capture, call, dialect, neutral, request, self._keep_alive)

    async def _refuse(
        self, live: _Live | None, dialect: Dialect, request: web.BaseRequest, refusal: Refusal
    ) -> web.StreamResponse:
        if live is not None and refusal.kind != "server":
            live.capture.stats.refused += 1
        status, body = dialect.error(refusal)
        return await send(request, status, body)

    def _authorise(self, listener_key: str | None, request: web.BaseRequest, path_id: str | None) -> _Live:
        given = request.headers.get("x-api-key") or ""
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer" and token.strip():
            given = token.strip()
        live = self._live.get(given)
        if live is None or (listener_key is not None and not hmac.compare_digest(listener_key, given)):
            raise Refusal("unauthorized", "this key is not that of a live execution")
        if path_id is not None and path_id != live.told.path:
            raise Refusal("unauthorized", "this path is another execution's")
        return live


def _split(path: str) -> tuple[str | None, str]:
    """(id or None, rest) of a path that may begin with /s/<id>."""
    found = _PREFIX.fullmatch(path)
    return (found[1], found[2]) if found else (None, path)


async def _body(request: web.BaseRequest, most: int) -> bytes:
    """The whole body, decompressed. Raises Refusal beyond `most` bytes."""
    pieces: list[bytes] = []
    length = 0
    try:
        async for piece in request.content.iter_any():
            pieces.append(piece)
            length += len(piece)
            if length > most:
                raise Refusal("too_large", f"the body has more than {most} bytes")
    except web.RequestPayloadError as error:
        raise Refusal("invalid", f"the body cannot be read: {error}") from error
    return b"".join(pieces)
