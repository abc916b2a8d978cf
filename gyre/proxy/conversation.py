"""The neutral conversation that every dialect maps to, and its hash chain.

Owns what "the same message" means. Invariant: two requests that differ only in spelling (key order, JSON
white space, surrounding white space of text, thinking blocks, the order of tools) have one chain; any other
difference forks it.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal

import msgspec

Key = bytes
"""A place in the chain: 16 bytes that stand for everything before it."""


class ToolCall(msgspec.Struct, frozen=True, gc=False):
    """A call of a tool. `arguments` is JSON text, as it was written."""

    id: str
    name: str
    arguments: str


class Message(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One message. `calls` and `thinking` belong to the assistant, `call_id` to a tool result.

    `issued` is any other id of ours that the harness echoed (a thinking signature, an item id).
    """

    role: Literal["system", "user", "assistant", "tool"]
    text: str = ""
    thinking: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    issued: str = ""


class Tool(msgspec.Struct, frozen=True):
    """A tool that is offered. `spec` is {"type": "function", "function": {...}}, as templates expect it."""

    name: str
    spec: dict[str, Any]


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """What a request says. `system` is None when the request has no system prompt."""

    system: str | None = None
    tools: tuple[Tool, ...] = ()
    messages: tuple[Message, ...] = ()


def canonical(text: str) -> str:
    """JSON text in one spelling (sorted keys, no white space); text that is not JSON, stripped."""
    try:
        return msgspec.json.encode(msgspec.json.decode(text), order="sorted").decode()
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError):
        return text.strip()


def visible(message: Message) -> bytes:
    """Digest of what a harness sees of an assistant message: text, names and arguments; no ids, no thinking."""
    parts = [message.text.strip()]
    for call in message.calls:
        parts += (call.name, canonical(call.arguments))
    return _digest(b"said", *parts)


def opening_key(thread: str, conversation: Conversation) -> Key:
    """The chain's start: the thread, the system prompt and the tools."""
    tools = sorted(json.dumps(tool.spec, sort_keys=True) for tool in conversation.tools)
    system = ["none"] if conversation.system is None else ["some", conversation.system]
    return _digest(b"opening", thread, *system, *tools)


def extend(key: Key, message: Message) -> Key:
    """The place after `message`, which is not an assistant's."""
    return _digest(b"message", key, message.role, message.text.strip(), message.call_id)


def extend_said(key: Key, said: bytes) -> Key:
    """The place after an assistant's message, by what is visible of it; one that we sampled counts like any other."""
    return _digest(b"assistant", key, said)


def _digest(kind: bytes, *parts: str | bytes) -> bytes:
    state = hashlib.blake2b(digest_size=16, person=kind)
    for part in parts:
        # Lone surrogates can come out of JSON escapes: they must hash, not raise.
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        # Lengths keep ("a", "b") apart from ("ab", "").
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.digest()
