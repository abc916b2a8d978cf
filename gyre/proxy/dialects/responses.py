"""OpenAI Responses: replies, event streams and errors. Requests are read by `responses_request.py`.

Invariant: the whole reply is known before its first item, so an event stream is always well formed, its numbers
consecutive from the first keep-alive on. Each item carries the reply's id: so we know it again when it comes back.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from gyre.proxy.conversation import ToolCall
from gyre.proxy.dialects.chat import ERRORS, error_body
from gyre.proxy.dialects.responses_request import CUSTOM, read
from gyre.proxy.exchange import Opening, Refusal, Reply, Request
from gyre.proxy.histories import Histories


class Responses:
    """See `Dialect`."""

    paths: tuple[str, ...] = ("/v1/responses", "/responses")
    counting: tuple[str, ...] = ()

    def read(self, body: bytes, histories: Histories | None = None) -> Request:
        return read(body, histories or Histories())

    def write(self, request: Request, reply: Reply) -> bytes:
        return msgspec.json.encode(_whole(request, reply))

    def count(self, tokens: int) -> bytes:
        # No path of this dialect counts.
        return msgspec.json.encode({"object": "response.input_tokens", "input_tokens": tokens})

    def events(self, request: Request, reply: Reply, lives: int) -> Iterator[bytes]:
        number = _Numbers(lives + 1 if lives else 0)
        if not lives:
            begun = _response(reply.id, reply.created, reply.model, "in_progress")
            yield number.event({"type": "response.created", "response": begun})
            yield number.event({"type": "response.in_progress", "response": begun})
        for index, item in enumerate(_items(request, reply)):
            for event in _item_events(index, item):
                yield number.event(event)
        whole = _whole(request, reply)
        yield number.event({"type": f"response.{whole['status']}", "response": whole})

    def keep_alive(self, request: Request, opening: Opening) -> bytes:
        begun = _response(opening.id, opening.created, request.model, "in_progress")
        number = _Numbers(opening.lives + 1 if opening.lives else 0)
        first = b"" if opening.lives else number.event({"type": "response.created", "response": begun})
        return first + number.event({"type": "response.in_progress", "response": begun})

    def error(self, refusal: Refusal) -> tuple[int, bytes]:
        return ERRORS[refusal.kind][0], msgspec.json.encode(_error(refusal))

    def error_event(self, request: Request, refusal: Refusal, opening: Opening) -> bytes:
        told = _error(refusal)["error"]
        failed = _response(opening.id, opening.created, request.model, "failed")
        failed["error"] = {"code": told["code"], "message": told["message"]}
        number = _Numbers(opening.lives + 1 if opening.lives else 0)
        return number.event({"type": "response.failed", "response": failed})

    def models(self, names: list[str]) -> bytes:
        return msgspec.json.encode({"object": "list", "data": [{"id": n, "object": "model"} for n in names]})


class _Numbers:
    """Numbers the events of one stream."""

    def __init__(self, start: int) -> None:
        self._next = start

    def event(self, data: dict[str, Any]) -> bytes:
        numbered = {**data, "sequence_number": self._next}
        self._next += 1
        return b"event: " + data["type"].encode() + b"\ndata: " + msgspec.json.encode(numbered) + b"\n\n"


def _response(reply_id: str, created: int, model: str, status: str) -> dict[str, Any]:
    return {
        "id": f"resp_{reply_id}",
        "object": "response",
        "created_at": created,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "model": model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": None,
    }


def _whole(request: Request, reply: Reply) -> dict[str, Any]:
    cut = reply.finish == "length"
    whole = _response(reply.id, reply.created, reply.model, "incomplete" if cut else "completed")
    whole["output"] = _items(request, reply)
    whole["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
    whole["usage"] = {
        "input_tokens": reply.prompt_tokens,
        "input_tokens_details": {"cached_tokens": reply.cached_tokens},
        "output_tokens": reply.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.prompt_tokens + reply.output_tokens,
    }
    return whole


def _items(request: Request, reply: Reply) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if reply.thinking:
        said = [{"type": "reasoning_text", "text": reply.thinking}]
        mark = {"encrypted_content": reply.id, "status": "completed"}
        items.append({"type": "reasoning", "id": f"rs_{reply.id}", "summary": [], "content": said, **mark})
    if reply.text or not reply.calls:
        text = [{"type": "output_text", "text": reply.text, "annotations": []}]
        head = {"type": "message", "id": f"msg_{reply.id}", "role": "assistant", "status": "completed"}
        items.append({**head, "content": text})
    return items + [_call(request, reply, index, call) for index, call in enumerate(reply.calls)]


def _call(request: Request, reply: Reply, index: int, call: ToolCall) -> dict[str, Any]:
    name, space, kind = (*request.spoken.get(call.name, (call.name, "")), "")[:3]
    item_id = f"_{reply.id}_{index}"
    if kind == CUSTOM:
        text = json.loads(call.arguments).get("input", "")
        written = text if isinstance(text, str) else call.arguments
        custom = {"type": "custom_tool_call", "id": "ctc" + item_id, "status": "completed"}
        return {**custom, "call_id": call.id, "name": name, "input": written}
    item = {"type": "function_call", "id": "fc" + item_id, "status": "completed", "call_id": call.id, "name": name}
    item["arguments"] = call.arguments
    if space:
        item["namespace"] = space
    return item


def _item_events(index: int, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    place = {"output_index": index, "item_id": item["id"]}
    kind = item["type"]
    empty = {**item, "status": "in_progress"}
    empty |= {"content": []} if kind in ("message", "reasoning") else {}
    field = {"function_call": "arguments", "custom_tool_call": "input"}.get(kind, "")
    empty |= {field: ""} if field else {}
    yield {"type": "response.output_item.added", "output_index": index, "item": empty}
    if kind == "message":
        yield from _text_events({**place, "content_index": 0}, item["content"][0])
    elif kind == "reasoning":
        text = item["content"][0]["text"]
        yield {"type": "response.reasoning_text.delta", **place, "content_index": 0, "delta": text}
        yield {"type": "response.reasoning_text.done", **place, "content_index": 0, "text": text}
    else:
        name = "response.function_call_arguments" if kind == "function_call" else "response.custom_tool_call_input"
        yield {"type": f"{name}.delta", **place, "delta": item[field]}
        named = {"name": item["name"]} if kind == "function_call" else {}
        yield {"type": f"{name}.done", **place, field: item[field], **named}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _text_events(place: dict[str, Any], part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    text = part["text"]
    yield {"type": "response.content_part.added", **place, "part": {**part, "text": ""}}
    yield {"type": "response.output_text.delta", **place, "delta": text, "logprobs": []}
    yield {"type": "response.output_text.done", **place, "text": text, "logprobs": []}
    yield {"type": "response.content_part.done", **place, "part": part}


def _error(refusal: Refusal) -> dict[str, Any]:
    told = error_body(refusal)
    if refusal.kind == "context":
        told["error"]["param"] = "input"
    return told
