"""OpenAI Responses: from a request's items to the neutral `Request`.

Owns how items gather into messages: reasoning, text and calls of one reply are one assistant's message. Invariant:
whatever a model of text cannot be told is refused with the field's name; tools that a server of OpenAI's would run are
not rendered; what varies from call to call without meaning stays out of the request's identity.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from gyre.proxy.conversation import Conversation, Message, Tool, ToolCall
from gyre.proxy.dialects.reading import listed, optional, positive
from gyre.proxy.exchange import Hints, Refusal, Request
from gyre.proxy.histories import Histories, Reader, decoded, identity

_ASKED = ("temperature", "top_p", "reasoning", "parallel_tool_calls", "service_tier", "truncation", "verbosity")
_NOT_SERVED = ("previous_response_id", "conversation", "background", "prompt", "top_logprobs")
_SERVER_TOOLS = ("web_search", "image_generation", "file_search", "code_interpreter")
_NO_MEANING = ("client_metadata", "metadata")
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TEXTS = ("input_text", "output_text", "text")
CUSTOM = "custom"
_FREEFORM = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
"""What a tool that takes free text looks like to the model: a function of one text."""


def read(body: bytes, histories: Histories) -> Request:
    """Raises Refusal."""
    fields, (messages, users, digest) = histories.read(body, "input", _Reader(), _of_text)
    value = decoded(fields, ("input", "tools"))
    _refuse_unserved(value)
    tools, server_tools, spoken = histories.once(fields, "tools", _all_tools)
    if value.get("tool_choice") == "none":
        tools = ()
    if not messages:
        raise Refusal("invalid", "input: text or a list with at least one item is needed")
    return Request(
        conversation=Conversation(
            system=optional(value, "instructions", str, "") or None,
            tools=tools,
            messages=messages,
        ),
        model=optional(value, "model", str, ""),
        max_tokens=positive(value, "max_output_tokens"),
        stream=optional(value, "stream", bool, False),
        asked={name: value[name] for name in _ASKED if value.get(name) is not None},
        hints=Hints(
            first_user=users[0] if users else (),
            last_user=users[-1] if users else (),
            server_tools=server_tools,
        ),
        identity=identity(fields, digest, ("input", *_NO_MEANING)),
        spoken=spoken,
    )


def _refuse_unserved(value: dict[str, Any]) -> None:
    for name in _NOT_SERVED:
        if value.get(name):
            raise Refusal("unsupported", f"{name} is not served here")
    if value.get("tool_choice") not in (None, "auto", "none"):
        raise Refusal("unsupported", "tool_choice: only auto and none are served")
    shape = optional(value, "text", dict, {}).get("format")
    if shape is not None and (not isinstance(shape, dict) or shape.get("type") != "text"):
        raise Refusal("unsupported", "text.format: only text is served")


def _of_text(given: msgspec.Raw) -> msgspec.Raw:
    """The item that a text alone stands for."""
    return msgspec.Raw(b'{"role":"user","content":%b}' % bytes(given))


class _Reader(Reader):
    """An assistant's message is open until something else comes, or another reply's id."""

    def read(self, item: dict[str, Any], index: int) -> None:
        where = f"input[{index}]"
        kind = item.get("type") or "message"
        if kind == "message":
            self._message(item, where)
        elif kind == "reasoning":
            thinking = [*_parts(item.get("content"), where, ("reasoning_text",))]
            thinking = thinking or [*_parts(item.get("summary"), where, ("summary_text",))]
            self._say(item, where, thinking="\n".join(thinking))
        elif kind in ("function_call", "custom_tool_call"):
            self._say(item, where, calls=(_call(item, where),))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            self.close()
            output = item.get("output")
            text = output if isinstance(output, str) else "\n".join(_parts(output, where, _TEXTS))
            self.messages.append(Message(role="tool", text=text, call_id=_needed(item, "call_id", where)))
        else:
            raise Refusal("unsupported", f"{where}.type: {kind!r} items are not served here")

    def _message(self, item: dict[str, Any], where: str) -> None:
        given = item.get("role")
        role = _ROLES.get(given) if isinstance(given, str) else None
        if role is None:
            raise Refusal("invalid", f"{where}.role: {given!r} is not served")
        content = item.get("content")
        texts = [content] if isinstance(content, str) else _parts(content, where, _TEXTS)
        if role == "assistant":
            self._say(item, where, text="".join(texts))
            return
        self.close()
        if role == "user":
            self.users.append(tuple(texts))
        self.messages.append(Message(role="user" if role == "user" else "system", text="\n".join(texts)))

    def _say(
        self, item: dict[str, Any], where: str, text: str = "", thinking: str = "", calls: tuple[ToolCall, ...] = ()
    ) -> None:
        issued = _issued(item, where)
        before = self.open
        # Another reply's item, or thinking after its calls, begins a message of its own.
        if before is not None and (
            (issued and before.issued and issued != before.issued) or (thinking and before.calls)
        ):
            self.close()
            before = None
        before = before or Message(role="assistant")
        self.open = Message(
            role="assistant",
            text=before.text + text,
            thinking=before.thinking + thinking,
            calls=before.calls + calls,
            issued=before.issued or issued,
        )


def _issued(item: dict[str, Any], where: str) -> str:
    """The reply's id in an item that we made: in what we "encrypted", else in the item's own id."""
    for name in ("encrypted_content", "id"):
        found = optional(item, name, str, "", where + ".")
        if found:
            return found.partition("_")[2].partition("_")[0] if name == "id" else found
    return ""


def _call(item: dict[str, Any], where: str) -> ToolCall:
    name, space = _needed(item, "name", where), optional(item, "namespace", str, "", where + ".")
    if item["type"] == "custom_tool_call":
        arguments = json.dumps({"input": _needed(item, "input", where)}, ensure_ascii=False)
    else:
        arguments = _needed(item, "arguments", where) or "{}"
    return ToolCall(_needed(item, "call_id", where), f"{space}.{name}" if space else name, arguments)


def _parts(content: Any, where: str, kinds: tuple[str, ...]) -> list[str]:
    if content is None:
        return []
    if not isinstance(content, list):
        raise Refusal("invalid", f"{where}: text or a list of parts is needed")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds:
            raise Refusal("unsupported", f"{where}[{index}]: parts of type {kind!r} are not served, only text")
        texts.append(_needed(part, "text", f"{where}[{index}]"))
    return texts


def _needed(item: dict[str, Any], name: str, where: str) -> str:
    found = item.get(name)
    if not isinstance(found, str):
        raise Refusal("invalid", f"{where}.{name}: text is needed")
    return found


def _all_tools(given: Any) -> tuple[tuple[Tool, ...], tuple[str, ...], dict[str, tuple[str, ...]]]:
    return _tools(listed({"tools": given}, "tools"))


def _tools(
    given: list[dict[str, Any]], space: str = ""
) -> tuple[tuple[Tool, ...], tuple[str, ...], dict[str, tuple[str, ...]]]:
    """(tools, types that are not rendered, rendered name -> (name, namespace or CUSTOM))."""
    tools: list[Tool] = []
    server: list[str] = []
    spoken: dict[str, tuple[str, ...]] = {}
    for index, tool in enumerate(given):
        where = f"tools[{index}]"
        kind = optional(tool, "type", str, "", where + ".")
        if kind.startswith(_SERVER_TOOLS):
            server.append(kind)
        elif kind == "namespace" and not space:
            inner = _tools(listed(tool, "tools", where + "."), _needed(tool, "name", where))
            tools += inner[0]
            server += inner[1]
            spoken |= inner[2]
        elif kind in ("function", CUSTOM):
            name = _needed(tool, "name", where)
            shown = f"{space}.{name}" if space else name
            if space or kind == CUSTOM:
                spoken[shown] = (name, space) if space else (name, "", CUSTOM)
            parameters = _FREEFORM if kind == CUSTOM else optional(tool, "parameters", dict, {}, where + ".")
            about = optional(tool, "description", str, "", where + ".")
            function = {"name": shown, "description": about, "parameters": parameters}
            tools.append(Tool(shown, {"type": "function", "function": function}))
        else:
            raise Refusal("unsupported", f"{where}.type: {kind!r} is not served here")
    return tuple(tools), tuple(server), spoken
