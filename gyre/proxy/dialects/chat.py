"""OpenAI Chat Completions: replies, event streams and errors. Requests are read by `chat_request.py`.

Invariant: the whole reply is known before the first event that says anything, so an event stream is always
well formed; an error after the stream began is an event of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from gyre.proxy.dialects.chat_request import read
from gyre.proxy.exchange import Kind, Opening, Refusal, Reply, Request
from gyre.proxy.histories import Histories

ERRORS: dict[Kind, tuple[int, str, str | None]] = {
    "invalid": (400, "invalid_request_error", None),
    "unsupported": (400, "invalid_request_error", "unsupported_content"),
    "context": (400, "invalid_request_error", "context_length_exceeded"),
    "unauthorized": (401, "invalid_request_error", "invalid_api_key"),
    "limit": (403, "execution_limit", "execution_limit_reached"),
    "not_found": (404, "invalid_request_error", "not_found"),
    "too_large": (413, "invalid_request_error", "request_too_large"),
    "server": (503, "server_error", "generation_failed"),
}
"""Kind -> (HTTP status, type, code). A limit is not 429: clients would retry it."""


class Chat:
    """See `Dialect`."""

    paths: tuple[str, ...] = ("/v1/chat/completions", "/chat/completions")
    counting: tuple[str, ...] = ()

    def read(self, body: bytes, histories: Histories | None = None) -> Request:
        return read(body, histories or Histories())

    def write(self, request: Request, reply: Reply) -> bytes:
        message: dict[str, Any] = {"role": "assistant", "content": reply.text or None, "refusal": None}
        if not reply.calls:
            message["content"] = reply.text
        if reply.thinking:
            message["reasoning_content"] = reply.thinking
        if reply.calls:
            message["tool_calls"] = _calls(reply)
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish(reply)}
        whole = {**_head(reply.id, reply.created, reply.model, "chat.completion"), "choices": [choice]}
        return msgspec.json.encode({**whole, "usage": _usage(reply)})

    def count(self, tokens: int) -> bytes:
        # No path of this dialect counts.
        return msgspec.json.encode({"input_tokens": tokens})

    def events(self, request: Request, reply: Reply, lives: int) -> Iterator[bytes]:
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        if reply.thinking:
            deltas.append({"reasoning_content": reply.thinking})
        if reply.text:
            deltas.append({"content": reply.text})
        deltas += [{"tool_calls": [{"index": i, **call}]} for i, call in enumerate(_calls(reply))]
        head = _head(reply.id, reply.created, reply.model, "chat.completion.chunk")
        for delta in deltas:
            yield _event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
        yield _event({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": _finish(reply)}]})
        if request.usage_in_stream:
            yield _event({**head, "choices": [], "usage": _usage(reply)})
        yield b"data: [DONE]\n\n"

    def keep_alive(self, request: Request, opening: Opening) -> bytes:
        # An empty delta: comments do not count as life for every client.
        head = _head(opening.id, opening.created, request.model, "chat.completion.chunk")
        return _event({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": None}]})

    def error(self, refusal: Refusal) -> tuple[int, bytes]:
        return ERRORS[refusal.kind][0], msgspec.json.encode(error_body(refusal))

    def error_event(self, request: Request, refusal: Refusal, opening: Opening) -> bytes:
        return _event(error_body(refusal))

    def models(self, names: list[str]) -> bytes:
        rows = [{"id": name, "object": "model", "created": 0, "owned_by": "gyre"} for name in names]
        return msgspec.json.encode({"object": "list", "data": rows})


def _head(reply_id: str, created: int, model: str, kind: str) -> dict[str, Any]:
    return {"id": reply_id, "object": kind, "created": created, "model": model}


def _calls(reply: Reply) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in reply.calls
    ]


def _finish(reply: Reply) -> str:
    return "tool_calls" if reply.calls and reply.finish == "stop" else reply.finish


def _usage(reply: Reply) -> dict[str, Any]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.output_tokens,
        "total_tokens": reply.prompt_tokens + reply.output_tokens,
        "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
    }


def error_body(refusal: Refusal) -> dict[str, Any]:
    """OpenAI's error object; the Responses dialect has the same."""
    _, kind, code = ERRORS[refusal.kind]
    message = str(refusal)
    if refusal.kind == "context":
        # Harnesses look for these very words to know that they must compact.
        length, most = refusal.context
        message = (
            f"This model's maximum context length is {most} tokens. "
            f"However, your messages resulted in {length} tokens. Please reduce the length of the messages."
        )
    param = "messages" if refusal.kind == "context" else None
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"
