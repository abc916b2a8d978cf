"""Anthropic Messages: from a request's body to the neutral `Request`.

Invariant: whatever a model of text cannot be told is refused with the field's name, never dropped. Only what carries
no meaning for the model is left out: cache marks, billing lines, tools that a server of Anthropic's would run.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gyre.proxy.conversation import Conversation, Message, Tool, ToolCall
from gyre.proxy.dialects.reading import listed, optional, positive
from gyre.proxy.exchange import Hints, Refusal, Request
from gyre.proxy.histories import Histories, Reader, decoded, identity

_ASKED = ("temperature", "top_p", "top_k", "thinking", "output_config", "output_format", "service_tier", "speed")
_NOT_SERVED = ("mcp_servers", "container")
_BILLING = "x-anthropic-billing-header"
_SERVER_TOOLS = ("web_search_", "web_fetch_")
"""Types of tools that run at Anthropic: they are not rendered, since nobody would run them here."""


def read(body: bytes, histories: Histories) -> Request:
    """Raises Refusal."""
    fields, (messages, users, digest) = histories.read(body, "messages", _Reader())
    value = decoded(fields, ("messages", "tools"))
    for name in _NOT_SERVED:
        if value.get(name):
            raise Refusal("unsupported", f"{name}: not served here")
    if not messages:
        raise Refusal("invalid", "messages: at least one message is required")
    tools, server_tools = histories.once(fields, "tools", _tools)
    if _choice(value, bool(tools)) == "none":
        tools = ()
    return Request(
        conversation=Conversation(system=_system(value), tools=tools, messages=messages),
        model=optional(value, "model", str, ""),
        max_tokens=positive(value, "max_tokens"),
        stops=_stops(value),
        stream=optional(value, "stream", bool, False),
        asked={name: value[name] for name in _ASKED if value.get(name) is not None},
        hints=Hints(
            first_user=users[0] if users else (),
            last_user=users[-1] if users else (),
            server_tools=server_tools,
            structured=_structured(value),
            session=_session(value),
        ),
        identity=identity(fields, digest, ("messages",)),
    )


class _Reader(Reader):
    def read(self, item: dict[str, Any], index: int) -> None:
        _read_message(item, f"messages.{index}.", self.messages, self.users)


def _read_message(value: dict[str, Any], where: str, messages: list[Message], users: list[tuple[str, ...]]) -> None:
    role = value.get("role")
    blocks = _blocks(value.get("content"), where + "content")
    if role == "assistant":
        messages.append(_assistant(blocks, where))
        return
    if role not in ("user", "system"):
        raise Refusal("invalid", f"{where}role: {role!r} is not served; use user, assistant or system")
    texts: list[str] = []
    for index, block in enumerate(blocks):
        place = f"{where}content.{index}."
        kind = block.get("type")
        if kind == "text":
            texts.append(_needed(block, "text", place))
        elif kind == "tool_result" and role == "user":
            if texts:
                messages.append(Message(role="user", text="\n".join(texts)))
                users.append(tuple(texts))
                texts = []
            call_id = _needed(block, "tool_use_id", place)
            messages.append(Message(role="tool", text=_result(block, place), call_id=call_id))
        else:
            raise Refusal("unsupported", f"{place}type: {kind!r} blocks are not served here")
    if texts or not blocks:
        messages.append(Message(role="user" if role == "user" else "system", text="\n".join(texts)))
        if role == "user":
            users.append(tuple(texts))


def _assistant(blocks: list[dict[str, Any]], where: str) -> Message:
    texts: list[str] = []
    thinking: list[str] = []
    calls: list[ToolCall] = []
    issued = ""
    for index, block in enumerate(blocks):
        place = f"{where}content.{index}."
        kind = block.get("type")
        if kind == "text":
            texts.append(_needed(block, "text", place))
        elif kind == "thinking":
            thinking.append(_needed(block, "thinking", place))
            issued = issued or optional(block, "signature", str, "", place)
        elif kind == "tool_use":
            written = msgspec.json.encode(optional(block, "input", dict, {}, place)).decode()
            calls.append(ToolCall(_needed(block, "id", place), _needed(block, "name", place), written))
        else:
            raise Refusal("unsupported", f"{place}type: {kind!r} blocks are not served here")
    return Message(
        role="assistant",
        text="".join(texts),
        thinking="\n".join(thinking),
        calls=tuple(calls),
        issued=issued,
    )


def _result(block: dict[str, Any], where: str) -> str:
    texts = []
    for index, part in enumerate(_blocks(block.get("content") or "", where + "content")):
        if part.get("type") != "text":
            kind = part.get("type")
            raise Refusal("unsupported", f"{where}content.{index}.type: {kind!r} blocks are not served here")
        texts.append(_needed(part, "text", f"{where}content.{index}."))
    return "\n".join(texts)


def _blocks(content: Any, where: str) -> list[dict[str, Any]]:
    """Content as blocks: text alone is one block of text."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise Refusal("invalid", f"{where}: text or a list of blocks is required")
    return content


def _needed(block: dict[str, Any], name: str, where: str) -> str:
    found = block.get(name)
    if not isinstance(found, str):
        raise Refusal("invalid", f"{where}{name}: Field required")
    return found


def _system(value: dict[str, Any]) -> str | None:
    if value.get("system") is None:
        return None
    texts = []
    for index, block in enumerate(_blocks(value["system"], "system")):
        if block.get("type") != "text":
            raise Refusal("unsupported", f"system.{index}.type: only text is served")
        texts.append(_needed(block, "text", f"system.{index}."))
    # The billing line holds a number of its own for every request: it would part equal histories.
    kept = [text for text in texts if not text.startswith(_BILLING)]
    return "\n".join(kept) if kept else None


def _tools(given: Any) -> tuple[tuple[Tool, ...], tuple[str, ...]]:
    tools, server = [], []
    for index, tool in enumerate(listed({"tools": given}, "tools")):
        where = f"tools.{index}."
        kind = optional(tool, "type", str, "custom", where)
        if kind.startswith(_SERVER_TOOLS):
            server.append(kind)
            continue
        if kind != "custom":
            raise Refusal("unsupported", f"{where}type: {kind!r} is not served here")
        function = {
            "name": _needed(tool, "name", where),
            "description": optional(tool, "description", str, "", where),
            "parameters": optional(tool, "input_schema", dict, {}, where),
        }
        tools.append(Tool(_needed(tool, "name", where), {"type": "function", "function": function}))
    return tuple(tools), tuple(server)


def _choice(value: dict[str, Any], rendered: bool) -> str:
    kind = optional(value, "tool_choice", dict, {"type": "auto"}).get("type")
    # The web-search helper forces a tool that is not rendered: nothing is left to force.
    if kind not in ("auto", "none") and (rendered or kind not in ("any", "tool")):
        raise Refusal("unsupported", f"tool_choice: {kind!r} is not served, only auto and none")
    return str(kind)


def _stops(value: dict[str, Any]) -> tuple[str, ...]:
    stops: list[Any] = optional(value, "stop_sequences", list, [])
    if not all(isinstance(stop, str) for stop in stops):
        raise Refusal("invalid", "stop_sequences: a list of texts is needed")
    return tuple(stop for stop in stops if stop)


def _structured(value: dict[str, Any]) -> bool:
    wished: dict[str, Any] = optional(value, "output_config", dict, {})
    return bool(wished.get("format") or value.get("output_format"))


def _session(value: dict[str, Any]) -> str:
    """The session in metadata.user_id, which is JSON text; "" where there is none."""
    user = optional(value, "metadata", dict, {}).get("user_id")
    if not isinstance(user, str):
        return ""
    try:
        found = msgspec.json.decode(user)
    except (msgspec.MsgspecError, RecursionError):
        return ""
    session = found.get("session_id") if isinstance(found, dict) else None
    return session if isinstance(session, str) else ""
