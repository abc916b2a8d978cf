"""The HTTP side: SGLang's routes on aiohttp, in front of the compute thread.

The event loop computes nothing: it turns bodies into sequences and commands, and news from the compute thread into
answers. A client that goes away has its request aborted.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from gyre.engines.reference.auth import Keys, middleware
from gyre.engines.reference.engine import Engine, Refused
from gyre.engines.reference.replies import BadRequest, GenerateBody, checksum_reply, reply_of, sequence_of
from gyre.engines.reference.sequence import Sequence

_BODY_BYTES = 1 << 30
_TAGS = frozenset({"weights", "kv_cache", "cuda_graph"})
_T = TypeVar("_T", bound=msgspec.Struct)

_encode = msgspec.json.Encoder().encode


class AbortBody(msgspec.Struct):
    """`/abort_request`: every request whose id starts with rid."""

    rid: str = ""
    abort_all: bool = False


class PauseBody(msgspec.Struct):
    """`/pause_generation`."""

    mode: str = "abort"


class TensorsBody(msgspec.Struct):
    """`/update_weights_from_tensor`: one serialized bucket a tensor-parallel rank."""

    serialized_named_tensors: list[str]
    load_format: str | None = None
    flush_cache: bool = True
    weight_version: str | None = None


class DiskBody(msgspec.Struct):
    """`/update_weights_from_disk`."""

    model_path: str
    weight_version: str | None = None
    flush_cache: bool = True


class VersionBody(msgspec.Struct):
    """`/update_weight_version`; it aborts everything unless told otherwise, as SGLang does."""

    new_version: str
    abort_all_requests: bool = True


class TagsBody(msgspec.Struct):
    """`/release_memory_occupation`, `/resume_memory_occupation`; no tags means all."""

    tags: list[str] | None = None


class CheckerBody(msgspec.Struct):
    """`/weights_checker`."""

    action: str = "checksum"


class Empty(msgspec.Struct):
    """A body without fields that matter."""


class Reader:
    """One answer in the making: wakes its handler when its sequence has news."""

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.news = asyncio.Event()


class Server:
    """The application of one engine. `failed` is set when the compute thread is gone."""

    def __init__(
        self, engine_of: Callable[[Callable[[list[Sequence]], None]], Engine], info: dict[str, Any], keys: Keys
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.failed = asyncio.Event()
        self.engine = engine_of(self._news_from_thread)
        self._info = info
        self._stream_interval = int(info["stream_interval"])
        management = {
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/begin_weight_update": self._begin,
            "/end_weight_update": self._end,
            "/update_weights_from_tensor": self._tensors,
            "/update_weights_from_disk": self._disk,
            "/update_weight_version": self._version,
            "/flush_cache": self._flush,
            "/release_memory_occupation": self._release,
            "/resume_memory_occupation": self._take_back,
            "/weights_checker": self._checker,
        }
        self.app = web.Application(middlewares=[middleware(keys, frozenset(management))], client_max_size=_BODY_BYTES)
        for path, handler in management.items():
            self.app.router.add_post(path, handler)
        self.app.router.add_get("/flush_cache", self._flush)
        self.app.router.add_post("/generate", self._generate)
        for path in ("/health", "/ready"):
            self.app.router.add_get(path, self._health)
        self.app.router.add_get("/health_generate", self._health_generate)
        for path in ("/server_info", "/get_server_info"):
            self.app.router.add_get(path, self._server_info)
        self.app.router.add_get("/model_info", self._model_info)
        self.app.router.add_get("/v1/loads", self._loads)

    # -- from the compute thread

    def _news_from_thread(self, news: list[Sequence]) -> None:
        self._loop.call_soon_threadsafe(self._wake, news)

    def _wake(self, news: list[Sequence]) -> None:
        for sequence in news:
            sequence.reader.news.set()
        if self.engine.failure is not None:
            self.failed.set()

    # -- generation

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        model = self.engine.model
        try:
            body = msgspec.json.decode(await request.read(), type=GenerateBody)
            rid = body.rid or secrets.token_hex(16)
            context = self.engine.batch.limits.context
            dense = not model.shape.chosen
            sequence = sequence_of(body, rid, model.vocab_size, context, model.eos_ids, dense)
        except (BadRequest, msgspec.DecodeError) as error:
            return _error(str(error), 400)
        reader = sequence.reader = Reader(sequence)
        self.engine.submit(lambda: self.engine.add(sequence))
        try:
            if body.stream:
                return await self._stream(request, reader, body.return_logprob)
            while not sequence.done:
                await _next(reader)
            if sequence.error is not None:
                return _error(sequence.error[1], sequence.error[0])
            return _json(self._reply(sequence, sequence.published, True, body.return_logprob))
        finally:
            if not sequence.done:
                self.engine.submit(lambda: self.engine.abort(lambda other: other is sequence))

    async def _stream(self, request: web.Request, reader: Reader, logprobs: bool) -> web.StreamResponse:
        """Server-sent events, each with everything so far. Events that nobody had time to send are left out."""
        sequence = reader.sequence
        while not sequence.done and sequence.published == 0:
            await _next(reader)
        if sequence.error is not None:
            return _error(sequence.error[1], sequence.error[0])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        sent = 0
        while True:
            done, count = sequence.done, sequence.published
            if sequence.error is not None:
                await response.write(_event({"error": {"message": sequence.error[1], "code": sequence.error[0]}}))
                break
            if done or sent == 0 or count >= sent + self._stream_interval:
                # `done` was read before `count`, so a final event has every token.
                count = sequence.published if done else count
                await response.write(_event(self._reply(sequence, count, done, logprobs)))
                sent = count
            if done:
                break
            await _next(reader)
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _reply(self, sequence: Sequence, count: int, done: bool, logprobs: bool) -> dict[str, Any]:
        return reply_of(sequence, count, done, logprobs, self.engine.batch.version)

    # -- requests in flight

    async def _abort(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request, AbortBody)
        chosen = (
            (lambda _: True) if body.abort_all else (lambda other: bool(body.rid) and other.rid.startswith(body.rid))
        )
        await self._do(self.engine.submit(lambda: self.engine.abort(chosen)))
        return web.Response()

    async def _pause(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request, PauseBody)
        await self._do(self.engine.submit(lambda: self.engine.pause(body.mode)))
        return _json({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, request: web.Request) -> web.StreamResponse:
        await _body(request, Empty)
        await self._do(self.engine.submit(self.engine.resume))
        return _json({"message": "Generation continued successfully.", "status": "ok"})

    async def _flush(self, request: web.Request) -> web.StreamResponse:
        try:
            timeout = float(request.query.get("timeout", "0"))
        except ValueError:
            return _error("timeout must be a number of seconds", 400)
        engine = self.engine
        idle = engine.submit(
            engine.batch.flush,
            ready=lambda: not engine.batch.live,
            timeout=timeout,
            late="Flush cache failed.",
        )
        await self._do(idle)
        return web.Response(text="Cache flushed.\n")

    # -- weights and memory

    async def _begin(self, request: web.Request) -> web.StreamResponse:
        await _body(request, Empty)
        await self._do(self.engine.submit(self.engine.begin_update, ready=self.engine.quiet))
        return _json({"success": True, "message": "Success"})

    async def _end(self, request: web.Request) -> web.StreamResponse:
        await _body(request, Empty)
        await self._do(self.engine.submit(self.engine.end_update))
        return _json({"success": True, "message": "Success"})

    async def _tensors(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request, TensorsBody)
        if body.load_format is not None or len(body.serialized_named_tensors) != 1:
            return _error("the reference engine has one rank and takes load_format null", 400)
        encoded = body.serialized_named_tensors[0]
        await self._do(
            self.engine.submit(lambda: self.engine.update_tensors(encoded, body.weight_version, body.flush_cache))
        )
        return _json({"success": True, "message": "Success"})

    async def _disk(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request, DiskBody)
        await self._do(
            self.engine.submit(
                lambda: self.engine.update_from_disk(body.model_path, body.weight_version, body.flush_cache),
                ready=self.engine.quiet,
            )
        )
        return _json({"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0})

    async def _version(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request, VersionBody)
        await self._do(self.engine.submit(lambda: self.engine.set_version(body.new_version, body.abort_all_requests)))
        return _json({"success": True, "message": "Success", "new_version": body.new_version})

    async def _release(self, request: web.Request) -> web.StreamResponse:
        tags = await _tags(request)
        await self._do(self.engine.submit(lambda: self.engine.release(tags)))
        return _json(None)

    async def _take_back(self, request: web.Request) -> web.StreamResponse:
        tags = await _tags(request)
        await self._do(self.engine.submit(lambda: self.engine.take_back(tags)))
        return _json(None)

    async def _checker(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request, CheckerBody)
        if body.action != "checksum":
            return _error(f"the reference engine has no weights checker action {body.action!r}", 400)
        if "weights" in self.engine.released:
            return _error("the weights are released", 400)
        return _json(checksum_reply(await self._do(self.engine.submit(self.engine.model.checksum))))

    # -- information

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return web.Response(status=200 if self.engine.failure is None else 503)

    async def _health_generate(self, request: web.Request) -> web.StreamResponse:
        """200 once the compute thread has answered: it is not stuck in a step."""
        await self._do(self.engine.submit(lambda: None))
        return web.Response()

    async def _server_info(self, request: web.Request) -> web.StreamResponse:
        batch = self.engine.batch
        state = {
            "weight_version": batch.version,
            "paused": self.engine.paused,
            "released": sorted(self.engine.released),
            "sampled_tokens": batch.sampled_tokens,
            "cached_tokens": batch.cached_tokens,
        }
        return _json({**self._info, "weight_version": batch.version, "internal_states": [state]})

    async def _model_info(self, request: web.Request) -> web.StreamResponse:
        model = self.engine.model
        return _json({"model_path": model.path, "is_generation": True, "weight_version": self.engine.batch.version})

    async def _loads(self, request: web.Request) -> web.StreamResponse:
        batch = self.engine.batch
        limit = batch.limits.slots * batch.limits.context
        row = await self._do(
            self.engine.submit(
                lambda: {
                    "dp_rank": 0,
                    "num_running_reqs": len(batch.live),
                    "num_waiting_reqs": len(batch.waiting),
                    "num_used_tokens": batch.used_tokens,
                    "max_total_num_tokens": limit,
                    "max_running_requests": batch.limits.slots,
                    "token_usage": batch.used_tokens / limit,
                }
            )
        )
        return _json({"version": self._info["version"], "loads": [row]})

    async def _do(self, future: Future[Any]) -> Any:
        """The result of a command; a refusal becomes HTTP 400, a broken engine HTTP 500."""
        try:
            return await asyncio.wrap_future(future)
        except Refused as refusal:
            raise _http_error(str(refusal), 400) from refusal
        except RuntimeError as error:
            raise _http_error(str(error), 500) from error


async def _next(reader: Reader) -> None:
    await reader.news.wait()
    reader.news.clear()


async def _body(request: web.Request, kind: type[_T]) -> _T:
    data = await request.read()
    try:
        return msgspec.json.decode(data or b"{}", type=kind)
    except msgspec.DecodeError as error:
        raise _http_error(str(error), 400) from error


async def _tags(request: web.Request) -> set[str]:
    tags = set((await _body(request, TagsBody)).tags or _TAGS)
    if tags - _TAGS:
        raise _http_error(f"unknown tags: {', '.join(sorted(tags - _TAGS))}", 400)
    return tags


def _json(value: Any) -> web.Response:
    return web.Response(body=_encode(value), content_type="application/json")


def _event(value: Any) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"


def _error(message: str, status: int) -> web.Response:
    return web.Response(
        body=_encode({"error": {"message": message, "code": status}}), status=status, content_type="application/json"
    )


def _http_error(message: str, status: int) -> web.HTTPException:
    kind = web.HTTPBadRequest if status == 400 else web.HTTPInternalServerError
    return kind(body=_encode({"error": {"message": message, "code": status}}), content_type="application/json")
