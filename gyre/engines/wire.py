"""SGLang's JSON shapes, as the client reads and writes them (facts: `/generate` and `/v1/loads` of SGLang 0.5.23).

Pure: bytes and values in, values out. Unknown fields are ignored, so that a newer engine still reads.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from gyre.engines.errors import EngineRefused, EngineUnavailable
from gyre.engines.types import EngineLoad, Finish, GenerateChunk, GenerateRequest, Generation, Parameter, RankMemory

_MOST_ID = 1 << 22
"""Ids from here on are no token's: they are written one by one."""
_FINISH: dict[str, Finish] = {"stop": "stop", "length": "length", "abort": "abort"}


class FinishReason(msgspec.Struct):
    """`meta_info.finish_reason`; `matched` is a token id, or a string for a stop string (never asked for here)."""

    type: str
    matched: int | str | None = None
    message: str | None = None
    status_code: int | None = None


class VersionSpan(msgspec.Struct):
    """One run of output tokens [start, end) that was sampled with one weight version."""

    version: str
    start: int
    end: int


class MetaInfo(msgspec.Struct):
    """The part of `meta_info` that gyre uses. Log-probability rows are [logprob, token id, text or null]."""

    finish_reason: FinishReason | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    weight_version: str = ""
    weight_versions: list[VersionSpan] | None = None
    output_token_logprobs: list[tuple[float | None, int, str | None]] = []
    input_token_logprobs: list[tuple[float | None, int, str | None]] = []
    routed_experts: str | None = None


class Reply(msgspec.Struct):
    """One answer of `/generate`, or one server-sent event of it."""

    meta_info: MetaInfo | None = None
    output_ids: list[int] = []
    error: Any = None


class LoadRow(msgspec.Struct):
    """One data-parallel rank of `/v1/loads`."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_used_tokens: int = 0
    max_total_num_tokens: int = 0


class LoadsReply(msgspec.Struct):
    """The answer of `/v1/loads`; it carries no aggregate, so the caller sums."""

    loads: list[LoadRow] = []


class MemoryReply(msgspec.Struct):
    """The answer of `/remote_instance_transfer_engine_info`: a Mooncake session, and [address, elements, bytes an
    element] of each parameter by name."""

    remote_instance_transfer_engine_info: tuple[str, dict[str, tuple[int, int, int]]]


_reply = msgspec.json.Decoder(Reply)
_memory = msgspec.json.Decoder(MemoryReply)
_loads = msgspec.json.Decoder(LoadsReply)


def generate_body(request: GenerateRequest, stream: bool) -> dict[str, Any]:
    """The body of `/generate`.

    Sampling is fixed: full distribution at a temperature, so log-probabilities are exact.
    """
    sampling: dict[str, Any] = {
        "max_new_tokens": request.max_new_tokens,
        "temperature": request.temperature,
        "top_p": 1.0,
        "top_k": -1,
        "stop_token_ids": request.stop_token_ids,
        "ignore_eos": request.ignore_eos,
    }
    if request.json_schema is not None:
        sampling["json_schema"] = request.json_schema
    if request.sampling_seed is not None:
        sampling["sampling_seed"] = request.sampling_seed
    body: dict[str, Any] = {
        "input_ids": request.input_ids,
        "rid": request.rid,
        "sampling_params": sampling,
        "return_logprob": True,
        "stream": stream,
    }
    if request.cache_salt:
        body["cache_salt"] = request.cache_salt
    if request.return_routed_experts:
        body["return_routed_experts"] = True
    return body


def encode_generate(request: GenerateRequest, stream: bool) -> bytes:
    """The bytes of `generate_body`: the same value, in whatever spelling is cheapest to write."""
    body = generate_body(request, stream)
    del body["input_ids"]
    return b"".join([b'{"input_ids":', ids_json(request.input_ids), b",", msgspec.json.encode(body)[1:]])


def ids_json(ids: Sequence[int]) -> bytes | memoryview:
    """Token ids as JSON. Those in an array are looked up as 8 bytes each, spaces and a comma included.

    A prompt of 700,000 ids takes a millisecond so, a tenth of what its numbers take one by one.
    """
    if not isinstance(ids, array) or not len(ids):
        return msgspec.json.encode(list(ids))
    numbers = np.frombuffer(ids, dtype=np.int32)
    most = int(numbers.max())
    if numbers.min() < 0 or most >= _MOST_ID:
        return msgspec.json.encode(ids.tolist())
    written = np.empty(len(numbers) + 1, dtype=np.uint64)
    # The ids were checked: "clip" only spares numpy a second check, and a copy.
    _spelt(max(most, 1 << 16).bit_length()).take(numbers, out=written[1:], mode="clip")
    text = written.view(np.uint8)
    text[:8] = np.frombuffer(b"       [", dtype=np.uint8)
    text[-1] = ord("]")
    return text.data


@cache
def _spelt(bits: int) -> npt.NDArray[np.uint64]:
    """The ids below 2 ** bits, each as the 8 bytes of its digits, right-aligned, and a comma."""
    ids = np.arange(1 << bits)
    text = np.full((len(ids), 8), ord(" "), dtype=np.uint8)
    text[:, 7] = ord(",")
    for place in range(7):
        shown = ids >= 10**place if place else ids >= 0
        text[shown, 6 - place] = ord("0") + ids[shown] // 10**place % 10
    return text.view(np.uint64).reshape(-1)


def decode_reply(data: bytes) -> Reply:
    """One reply or event. Raises EngineUnavailable if it is not what SGLang sends."""
    try:
        return _reply.decode(data)
    except msgspec.DecodeError as error:
        raise EngineUnavailable(f"the engine's reply cannot be read: {error}") from error


def chunk_of(reply: Reply) -> GenerateChunk:
    """The chunk in a reply; a `Generation` if it has a finish reason.

    Raises EngineRefused or EngineUnavailable for an error inside a stream, and EngineUnavailable if ids and
    log-probabilities do not match.
    """
    meta = reply.meta_info
    if reply.error is not None or meta is None:
        raise_stream_error(reply.error)
    assert meta is not None
    rows = meta.output_token_logprobs
    if [row[1] for row in rows] != reply.output_ids:
        raise EngineUnavailable("the engine's log-probabilities are not those of its output ids")
    fields: dict[str, Any] = {
        "output_ids": reply.output_ids,
        "logprobs": [0.0 if row[0] is None else row[0] for row in rows],
        "versions": version_runs(meta, len(reply.output_ids)),
        "cached_tokens": meta.cached_tokens,
        "prompt_tokens": meta.prompt_tokens,
        "routed_experts": meta.routed_experts,
    }
    reason = meta.finish_reason
    if reason is None:
        return GenerateChunk(**fields)
    if reason.type not in _FINISH:
        raise EngineUnavailable(f"unknown finish reason {reason.type!r}")
    if reason.type == "abort" and (reason.status_code or 0) >= 400:
        # Not our abort: the scheduler gave the request up (bad input, queue full, out of memory).
        raise_stream_error({"message": reason.message, "code": reason.status_code})
    matched = reason.matched if isinstance(reason.matched, int) else None
    return Generation(**fields, finish=_FINISH[reason.type], matched=matched, message=reason.message or "")


def version_runs(meta: MetaInfo, length: int) -> list[tuple[str, int]]:
    """Runs of (version, length) that cover `length` output tokens.

    Raises EngineUnavailable if the engine's spans do not cover them.
    """
    if length == 0:
        return []
    if not meta.weight_versions:
        return [(meta.weight_version, length)]
    runs = [(span.version, span.end - span.start) for span in meta.weight_versions if span.end > span.start]
    if sum(count for _, count in runs) != length:
        raise EngineUnavailable(f"the engine's version spans {runs} do not cover {length} tokens")
    return runs


def raise_stream_error(error: Any) -> None:
    """Raise what an `error` field inside a 200 answer means."""
    code, message = 500, str(error)
    if isinstance(error, dict):
        code, message = int(error.get("code") or 500), str(error.get("message"))
    if 400 <= code < 500:
        raise EngineRefused(message, code)
    raise EngineUnavailable(message)


def error_message(data: bytes) -> str:
    """The message of an error answer: SGLang uses `error.message`, `error`, `message`, `detail`, or plain text."""
    try:
        value = msgspec.json.decode(data)
    except msgspec.DecodeError:
        return data.decode("utf-8", "replace")[:500]
    for name in ("error", "message", "detail"):
        found = value.get(name) if isinstance(value, dict) else None
        if isinstance(found, dict):
            found = found.get("message")
        if found:
            return str(found)[:500]
    return str(value)[:500]


def decode_loads(data: bytes) -> EngineLoad:
    """The sum of `/v1/loads` over its ranks."""
    try:
        rows = _loads.decode(data).loads
    except msgspec.DecodeError as error:
        raise EngineUnavailable(f"the engine's loads cannot be read: {error}") from error
    return EngineLoad(
        running=sum(row.num_running_reqs for row in rows),
        waiting=sum(row.num_waiting_reqs for row in rows),
        used_tokens=sum(row.num_used_tokens for row in rows),
        max_tokens=sum(row.max_total_num_tokens for row in rows),
    )


def decode_memory(data: bytes) -> RankMemory:
    """Where the parameters of one rank lie."""
    try:
        session, parameters = _memory.decode(data).remote_instance_transfer_engine_info
    except msgspec.DecodeError as error:
        raise EngineUnavailable(f"where the engine's parameters lie cannot be read: {error}") from error
    return RankMemory(session, {name: Parameter(*where) for name, where in parameters.items()})
