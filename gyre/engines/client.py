"""The client of SGLang's HTTP API (0.5.23): the only code in gyre that speaks it.

It keeps SGLang's known traps out of reach: ids outside the vocabulary never leave (they kill the server), request ids
have one length (abort matches prefixes), memory is released only when the engine reports itself idle, and log-
probabilities are always asked for, of the full temperature-scaled distribution.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Literal

import aiohttp
import msgspec
import numpy as np

from gyre.engines.errors import EngineRefused, EngineUnauthorized, EngineUnavailable
from gyre.engines.types import RID_LENGTH, EngineLoad, GenerateChunk, GenerateRequest, Generation, RankMemory
from gyre.engines.wire import chunk_of, decode_loads, decode_memory, decode_reply, encode_generate, error_message

PauseMode = Literal["abort", "in_place", "retract"]

_CONNECT_SECONDS = 10.0
_MANAGE_SECONDS = 300.0
_EVENT_END = b"\n\n"
_PIECE = 1 << 19


def vocabulary(model: Path) -> int | None:
    """Number of embeddings of a Hugging Face folder; None when its config.json does not say."""
    config = msgspec.json.decode((model / "config.json").read_bytes(), type=dict[str, Any])
    size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    return int(size) if size is not None else None


class EngineClient:
    """One engine, reached over one aiohttp session that the caller owns.

    api_key opens generation and information, admin_key the management routes (the api key is used if it is None).
    vocab_size is the model's number of embeddings; None skips the check.
    """

    def __init__(
        self,
        base_url: str,
        session: aiohttp.ClientSession,
        api_key: str | None = None,
        admin_key: str | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.vocab_size = vocab_size
        self._session = session
        self._api_key = api_key
        self._admin_key = admin_key or api_key

    def __repr__(self) -> str:
        return f"EngineClient({self.base_url!r})"

    # -- generation

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        """Yield cumulative chunks; the last one is a `Generation`.

        Leaving the iterator early (`contextlib.aclosing`) closes the connection, on which the engine aborts the
        request: that needs no admin key. Raises EngineUnavailable (also in mid-call: the chunks so far stand) and
        EngineRefused.
        """
        self._check_request(request)
        body = encode_generate(request, stream=True)
        try:
            async with self._session.post(
                self.base_url + "/generate",
                data=body if len(body) <= _PIECE else _pieces(body),
                headers={**self._headers(self._api_key), "Content-Length": str(len(body))},
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
            ) as response:
                await _check_status(response)
                async for event in _events(response.content):
                    if event == b"[DONE]":
                        return
                    yield chunk_of(decode_reply(event))
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise EngineUnavailable(_describe(error)) from error
        raise EngineUnavailable("the engine's stream ended before it was done")

    async def generate_once(self, request: GenerateRequest) -> Generation:
        """The whole generation in one answer. Raises EngineUnavailable and EngineRefused."""
        self._check_request(request)
        body = encode_generate(request, stream=False)
        data = await self._request("POST", "/generate", body, self._api_key, total=None)
        chunk = chunk_of(decode_reply(data))
        if not isinstance(chunk, Generation):
            raise EngineUnavailable("the engine answered without a finish reason")
        return chunk

    async def score(self, input_ids: list[int]) -> list[float]:
        """Log-probabilities (temperature 1) of input_ids[1:], each given what precedes it:

        Len(input_ids) - 1 floats.
        """
        self._check_ids(input_ids)
        body = {
            "input_ids": input_ids,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        reply = decode_reply(await self._post("/generate", body, self._api_key, total=None))
        rows = reply.meta_info.input_token_logprobs if reply.meta_info else []
        scores = [row[0] for row in rows[1:] if row[0] is not None]
        if len(scores) != len(input_ids) - 1:
            raise EngineUnavailable(f"the engine scored {len(scores)} of {len(input_ids) - 1} tokens")
        return scores

    def _check_request(self, request: GenerateRequest) -> None:
        if len(request.rid) != RID_LENGTH:
            raise EngineRefused(
                f"rid must have {RID_LENGTH} characters (new_rid makes one), this has {len(request.rid)}"
            )
        if request.max_new_tokens < 1:
            raise EngineRefused(f"max_new_tokens is {request.max_new_tokens}, it must be positive")
        self._check_ids(request.input_ids)
        self._check_ids(request.stop_token_ids, "stop token")

    def _check_ids(self, ids: Sequence[int], what: str = "token") -> None:
        if not len(ids) and what == "token":
            raise EngineRefused("the prompt has no tokens")
        if self.vocab_size is None or not len(ids):
            return
        numbers = np.asarray(ids)
        if numbers.min() < 0 or numbers.max() >= self.vocab_size:
            at = next(i for i, token in enumerate(ids) if not 0 <= token < self.vocab_size)
            raise EngineRefused(f"{what} id {ids[at]} at position {at} is outside the vocabulary of {self.vocab_size}")

    # -- requests in flight

    async def abort(self, rid: str) -> None:
        """Abort one request; its caller gets what was sampled so far. Unknown ids are ignored by the engine."""
        if len(rid) != RID_LENGTH:
            raise EngineRefused(f"abort needs a whole rid of {RID_LENGTH} characters: the engine matches prefixes")
        await self._manage("/abort_request", {"rid": rid})

    async def abort_all(self) -> None:
        """Abort every request, running or queued."""
        await self._manage("/abort_request", {"abort_all": True})

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Stop sampling; new requests wait for `resume_generation`.

        abort ends all requests with partial output; in_place keeps them and their KV; retract keeps them and drops
        their KV.
        """
        await self._manage("/pause_generation", {"mode": mode})

    async def resume_generation(self) -> None:
        """Go on after `pause`."""
        await self._manage("/continue_generation", {})

    async def flush_cache(self, timeout: float = 30.0) -> None:
        """Drop the prefix cache. Raises EngineRefused if requests still hold KV after `timeout` seconds."""
        await self._manage(f"/flush_cache?timeout={timeout}", {})

    async def wait_idle(self, timeout: float = 60.0, poll: float = 0.05) -> None:
        """Return once no request is running or waiting; EngineRefused after `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                while not (await self.loads()).idle:
                    await asyncio.sleep(poll)
        except TimeoutError as error:
            raise EngineRefused(f"the engine is still busy after {timeout:g} s") from error

    # -- weights and memory

    async def begin_weight_update(self) -> None:
        """Open a weight update. Raises EngineRefused if one is open."""
        await self._manage("/begin_weight_update", {"selector": "all"})

    async def update_tensors(self, serialized: list[str], weight_version: str | None = None) -> None:
        """Load one bucket, serialized once for each tensor-parallel rank (see `push.serialize_bucket`)."""
        body: dict[str, Any] = {"serialized_named_tensors": serialized, "load_format": None, "flush_cache": False}
        if weight_version is not None:
            body["weight_version"] = weight_version
        await self._manage("/update_weights_from_tensor", body)

    async def end_weight_update(self) -> None:
        """Close the weight update."""
        await self._manage("/end_weight_update", {})

    async def memory(self, rank: int) -> RankMemory:
        """Where the parameters of one tensor-parallel rank lie. Raises EngineRefused if it was not started so that
        others may write there."""
        path = f"/remote_instance_transfer_engine_info?rank={rank}"
        return decode_memory(await self._request("GET", path, None, self._admin_key, total=60.0))

    async def update_from_disk(self, path: str, weight_version: str) -> None:
        """Load a Hugging Face folder that the engine can read, and flush its cache."""
        await self._manage(
            "/update_weights_from_disk", {"model_path": path, "weight_version": weight_version, "flush_cache": True}
        )

    async def set_version(self, version: str) -> None:
        """Name the current weights; requests in flight are left alone."""
        await self._manage("/update_weight_version", {"new_version": version, "abort_all_requests": False})

    async def release_memory(self, tags: list[str]) -> None:
        """Give memory back (`weights`, `kv_cache`); what the prefix cache holds is lost.

        A busy SGLang dies of it, so a busy engine raises EngineRefused here. Its loads are a snapshot that can be
        old; its scheduler itself says, by flushing, that nothing runs, and that pages on their way to the store of KV
        pages have got there: for those it has half a minute.
        """
        load = await self.loads()
        if not load.idle:
            raise EngineRefused(f"memory is not released: {load.running} requests run and {load.waiting} wait")
        try:
            await self.flush_cache()
        except EngineRefused as error:
            raise EngineRefused(f"memory is not released: requests run ({error})", error.status) from error
        await self._manage("/release_memory_occupation", {"tags": tags})

    async def resume_memory(self, tags: list[str]) -> None:
        """Take released memory again. Weights must be pushed before the engine serves."""
        await self._manage("/resume_memory_occupation", {"tags": tags})

    async def weights_checksum(self) -> str:
        """The engine's digest over all its weights."""
        data = await self._manage("/weights_checker", {"action": "checksum"})
        return str(msgspec.json.decode(data)["per_engine_checksum"])

    # -- information

    async def health(self) -> bool:
        """True if the engine answers that it is well; False if it does not answer or is unwell."""
        try:
            await self._get("/health", total=_CONNECT_SECONDS)
        except (EngineUnavailable, EngineRefused):
            return False
        return True

    async def server_info(self, timeout: float = 60.0) -> dict[str, Any]:
        """The engine's arguments and internal state, as its scheduler reports them (so it answers while that works)."""
        return _object(await self._get("/server_info", total=timeout))

    async def model_info(self) -> dict[str, Any]:
        """Model path and `weight_version`."""
        return _object(await self._get("/model_info"))

    async def weight_version(self) -> str:
        """The version that the engine reports for its weights."""
        return str((await self.model_info())["weight_version"])

    async def loads(self) -> EngineLoad:
        """Requests and tokens in hand."""
        return decode_loads(await self._get("/v1/loads"))

    # -- transport

    async def _manage(self, path: str, body: dict[str, Any]) -> bytes:
        return await self._post(path, body, self._admin_key, total=_MANAGE_SECONDS)

    async def _post(self, path: str, body: dict[str, Any], key: str | None, total: float | None) -> bytes:
        return await self._request("POST", path, msgspec.json.encode(body), key, total)

    async def _get(self, path: str, total: float = 60.0) -> bytes:
        return await self._request("GET", path, None, self._api_key, total)

    async def _request(self, method: str, path: str, body: bytes | None, key: str | None, total: float | None) -> bytes:
        timeout = aiohttp.ClientTimeout(total=total, sock_connect=_CONNECT_SECONDS)
        try:
            async with self._session.request(
                method, self.base_url + path, data=body, headers=self._headers(key), timeout=timeout
            ) as response:
                await _check_status(response)
                return await response.read()
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise EngineUnavailable(_describe(error)) from error

    def _headers(self, key: str | None) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        return headers


async def _check_status(response: aiohttp.ClientResponse) -> None:
    if response.status < 400:
        return
    message = f"{response.url.path}: {error_message(await response.read())}"
    if response.status in (401, 403):
        raise EngineUnauthorized(message, response.status)
    if response.status >= 500 or response.status in (408, 429):
        raise EngineUnavailable(f"{message} (HTTP {response.status})")
    raise EngineRefused(message, response.status)


async def _pieces(body: bytes) -> AsyncIterator[memoryview]:
    """A large body in pieces that the socket can take: what is handed over whole is copied whole, more than once."""
    view = memoryview(body)
    for start in range(0, len(view), _PIECE):
        yield view[start : start + _PIECE]


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of server-sent events. Split here: cumulative events outgrow aiohttp's line limit."""
    buffer = bytearray()
    async for piece in content.iter_any():
        buffer += piece
        while (end := buffer.find(_EVENT_END)) >= 0:
            event = bytes(buffer[:end])
            del buffer[: end + len(_EVENT_END)]
            if event.startswith(b"data:"):
                yield event[5:].strip()


def _object(data: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise EngineUnavailable(f"the engine's answer cannot be read: {error}") from error


def _describe(error: BaseException) -> str:
    """What went wrong, without request headers (they hold a key)."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
