"""Anthropic Messages: replies, event streams and errors. Requests are read by `messages_request.py`.

Invariants: a stream holds complete blocks only, and no block is complete before the whole reply is known, for a
client gives up for good when a stream breaks after one. Keep-alives are empty pieces of a thinking block (the only
ones that Claude Code counts): a stream that had any begins with that block, whatever the reply turns out to be.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from gyre.proxy.dialects.messages_request import read
from gyre.proxy.exchange import Kind, Opening, Refusal, Reply, Request
from gyre.proxy.histories import Histories

_ERRORS: dict[Kind, tuple[int, str]] = {
    "invalid": (400, "invalid_request_error"),
    "unsupported": (400, "invalid_request_error"),
    "context": (400, "invalid_request_error"),
    "unauthorized": (401, "authentication_error"),
    "limit": (403, "permission_error"),
    "not_found": (404, "not_found_error"),
    "too_large": (413, "request_too_large"),
    "server": (529, "overloaded_error"),
}
"""Kind -> (HTTP status, type)."""


class Messages:
    """See `Dialect`."""

    paths: tuple[str, ...] = ("/v1/messages",)
    counting: tuple[str, ...] = ("/v1/messages/count_tokens",)

    def read(self, body: bytes, histories: Histories | None = None) -> Request:
        return read(body, histories or Histories())

    def write(self, request: Request, reply: Reply) -> bytes:
        message = _message(reply.id, reply.model, _usage(reply))
        message["content"] = _blocks(reply)
        message["stop_reason"] = _stop_reason(reply)
        return msgspec.json.encode(message)

    def count(self, tokens: int) -> bytes:
        return msgspec.json.encode({"input_tokens": tokens})

    def events(self, request: Request, reply: Reply, lives: int) -> Iterator[bytes]:
        blocks = _blocks(reply)
        if lives and blocks[0]["type"] != "thinking":
            blocks.insert(0, _thinking(reply))
        if not lives:
            yield _event({"type": "message_start", "message": _message(reply.id, reply.model, _usage(reply))})
        for index, block in enumerate(blocks):
            if index or not lives:
                yield _start(index, block)
            for delta in _deltas(block):
                yield _delta(index, delta)
            yield _event({"type": "content_block_stop", "index": index})
        ended = {"stop_reason": _stop_reason(reply), "stop_sequence": None}
        yield _event({"type": "message_delta", "delta": ended, "usage": _usage(reply)})
        yield _event({"type": "message_stop"})

    def keep_alive(self, request: Request, opening: Opening) -> bytes:
        alive = _delta(0, {"type": "thinking_delta", "thinking": ""})
        if opening.lives:
            return alive
        # What was read is known only with the reply: the last event has the true usage.
        unknown = {"input_tokens": 0, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        message = _message(opening.id, request.model, {**unknown, "output_tokens": 0})
        return _event({"type": "message_start", "message": message}) + _start(0, {"type": "thinking"}) + alive

    def error(self, refusal: Refusal) -> tuple[int, bytes]:
        return _ERRORS[refusal.kind][0], msgspec.json.encode(_error(refusal))

    def error_event(self, request: Request, refusal: Refusal, opening: Opening) -> bytes:
        return _event(_error(refusal))

    def models(self, names: list[str]) -> bytes:
        rows = [{"type": "model", "id": n, "display_name": n, "created_at": "1970-01-01T00:00:00Z"} for n in names]
        ends = {"first_id": names[0], "last_id": names[-1]} if names else {"first_id": None, "last_id": None}
        return msgspec.json.encode({"data": rows, "has_more": False, **ends})


def _message(reply_id: str, model: str, usage: dict[str, int]) -> dict[str, Any]:
    return {
        "id": f"msg_{reply_id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


def _blocks(reply: Reply) -> list[dict[str, Any]]:
    blocks = [_thinking(reply)] if reply.thinking else []
    if reply.text or not (blocks or reply.calls):
        # A reply without any block is taken for a broken stream; one that says nothing has an empty text.
        blocks.append({"type": "text", "text": reply.text})
    for call in reply.calls:
        blocks.append(
            {"type": "tool_use", "id": call.id, "name": call.name, "input": msgspec.Raw(call.arguments.encode())}
        )
    return blocks


def _thinking(reply: Reply) -> dict[str, Any]:
    # The signature comes back with the history: it is the id by which we know the turn again.
    return {"type": "thinking", "thinking": reply.thinking, "signature": reply.id}


def _start(index: int, block: dict[str, Any]) -> bytes:
    empty: dict[str, Any] = {"type": block["type"]}
    if block["type"] == "thinking":
        empty |= {"thinking": "", "signature": ""}
    elif block["type"] == "text":
        empty |= {"text": ""}
    else:
        empty |= {"id": block["id"], "name": block["name"], "input": {}}
    return _event({"type": "content_block_start", "index": index, "content_block": empty})


def _deltas(block: dict[str, Any]) -> list[dict[str, Any]]:
    if block["type"] == "text":
        return [{"type": "text_delta", "text": block["text"]}] if block["text"] else []
    if block["type"] == "tool_use":
        return [{"type": "input_json_delta", "partial_json": bytes(block["input"]).decode()}]
    said = [{"type": "thinking_delta", "thinking": block["thinking"]}] if block["thinking"] else []
    return [*said, {"type": "signature_delta", "signature": block["signature"]}]


def _delta(index: int, delta: dict[str, Any]) -> bytes:
    return _event({"type": "content_block_delta", "index": index, "delta": delta})


def _stop_reason(reply: Reply) -> str:
    if reply.finish == "length":
        return "max_tokens"
    return "tool_use" if reply.calls else "end_turn"


def _usage(reply: Reply) -> dict[str, int]:
    cached = min(reply.cached_tokens, reply.prompt_tokens)
    return {
        "input_tokens": reply.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": reply.output_tokens,
    }


def _error(refusal: Refusal) -> dict[str, Any]:
    message = str(refusal)
    if refusal.kind == "context":
        # Claude Code compacts on these very words. A prompt that fills the context leaves no room for a reply, so
        # the maximum is below it.
        length, most = refusal.context
        message = f"prompt is too long: {length} tokens > {min(most, length - 1)} maximum"
    return {"type": "error", "error": {"type": _ERRORS[refusal.kind][1], "message": message}}


def _event(data: dict[str, Any]) -> bytes:
    return b"event: " + data["type"].encode() + b"\ndata: " + msgspec.json.encode(data) + b"\n\n"
