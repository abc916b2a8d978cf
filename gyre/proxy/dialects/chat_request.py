"""OpenAI Chat Completions: from a request's body to the neutral `Request`.

Invariant: whatever a model of text cannot be told is refused with the field's name, never dropped; what the
harness asks for sampling is recorded and ignored, since log-probabilities must be those of the recipe's
distribution.
"""

from __future__ import annotations

from typing import Any

from gyre.proxy.conversation import Conversation, Message, Tool, ToolCall
from gyre.proxy.dialects.reading import optional
from gyre.proxy.exchange import Refusal, Request
from gyre.proxy.histories import Histories, Reader, decoded, identity

_ASKED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "reasoning_effort",
    "parallel_tool_calls",
)
_NOT_SERVED = (
    "functions",
    "function_call",
    "audio",
    "prediction",
    "web_search_options",
    "logprobs",
    "top_logprobs",
)
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def read(body: bytes, histories: Histories) -> Request:
    """Raises Refusal."""
    fields, (messages, _, digest) = histories.read(body, "messages", _Reader())
    value = decoded(fields, ("messages", "tools"))
    _refuse_unserved(value)
    if not messages:
        raise Refusal("invalid", "messages: a list with at least one message is needed")
    system = None
    if messages[0].role == "system":
        system, messages = messages[0].text, messages[1:]
    if not messages:
        raise Refusal("invalid", "messages: only a system message")
    tools = () if value.get("tool_choice") == "none" else histories.once(fields, "tools", _tools)
    stream = optional(value, "stream", bool, False)
    options: dict[str, Any] = optional(value, "stream_options", dict, {})
    return Request(
        conversation=Conversation(system=system, tools=tools, messages=messages),
        model=optional(value, "model", str, ""),
        max_tokens=_max_tokens(value),
        stops=_stops(value.get("stop")),
        stream=stream,
        usage_in_stream=stream and bool(options.get("include_usage")),
        asked={name: value[name] for name in _ASKED if value.get(name) is not None},
        identity=identity(fields, digest, ("messages",)),
    )


class _Reader(Reader):
    def read(self, item: dict[str, Any], index: int) -> None:
        self.messages.append(_message(item, f"messages[{index}]"))


def _refuse_unserved(value: dict[str, Any]) -> None:
    for name in _NOT_SERVED:
        if value.get(name):
            raise Refusal("unsupported", f"{name} is not served here")
    if value.get("n") not in (None, 1):
        raise Refusal("unsupported", "n: only one choice is served")
    if value.get("modalities") not in (None, ["text"]):
        raise Refusal("unsupported", "modalities: only text is served")
    shape = value.get("response_format")
    if shape is not None and (not isinstance(shape, dict) or shape.get("type") != "text"):
        raise Refusal("unsupported", "response_format: only text is served")
    if value.get("tool_choice") not in (None, "auto", "none"):
        raise Refusal("unsupported", "tool_choice: only auto and none are served")


def _message(value: dict[str, Any], where: str) -> Message:
    given = value.get("role")
    role = _ROLES.get(given) if isinstance(given, str) else None
    if role is None:
        raise Refusal("invalid", f"{where}.role: {given!r} is not served")
    for name in ("audio", "refusal", "function_call"):
        if value.get(name):
            raise Refusal("unsupported", f"{where}.{name} is not served here")
    if value.get("name") and role != "tool":
        raise Refusal("unsupported", f"{where}.name: participants have no names here")
    text = _text(value.get("content"), f"{where}.content", needed=role != "assistant")
    if role == "assistant":
        thinking = value.get("reasoning_content") or value.get("reasoning") or ""
        if not isinstance(thinking, str):
            raise Refusal("unsupported", f"{where}.reasoning_content: only text is served")
        return Message(role="assistant", text=text, thinking=thinking, calls=_calls(value, where))
    if role == "tool":
        call_id = value.get("tool_call_id")
        if not isinstance(call_id, str) or not call_id:
            raise Refusal("invalid", f"{where}.tool_call_id: missing")
        return Message(role="tool", text=text, call_id=call_id)
    return Message(role="system" if role == "system" else "user", text=text)


def _text(content: Any, where: str, needed: bool) -> str:
    """Text of a message; several text parts are joined by newlines."""
    if isinstance(content, str):
        return content
    if content is None and not needed:
        return ""
    if not isinstance(content, list):
        raise Refusal("invalid", f"{where}: text or a list of parts is needed")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise Refusal("unsupported", f"{where}[{index}]: parts of type {kind!r} are not served, only text")
        if not isinstance(part.get("text"), str):
            raise Refusal("invalid", f"{where}[{index}].text: missing")
        texts.append(part["text"])
    return "\n".join(texts)


def _calls(value: dict[str, Any], where: str) -> tuple[ToolCall, ...]:
    listed = value.get("tool_calls") or []
    if not isinstance(listed, list):
        raise Refusal("invalid", f"{where}.tool_calls: not a list")
    calls = []
    for index, call in enumerate(listed):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or call.get("type", "function") != "function":
            raise Refusal("unsupported", f"{where}.tool_calls[{index}]: only function calls are served")
        call_id, name = call.get("id") or "", function.get("name")
        arguments = function.get("arguments") or "{}"
        if not (isinstance(call_id, str) and isinstance(name, str) and isinstance(arguments, str)):
            raise Refusal("invalid", f"{where}.tool_calls[{index}]: id, name and arguments are text")
        calls.append(ToolCall(call_id, name, arguments))
    return tuple(calls)


def _tools(listed: Any) -> tuple[Tool, ...]:
    if listed is None:
        return ()
    if not isinstance(listed, list):
        raise Refusal("invalid", "tools: not a list")
    tools = []
    for index, spec in enumerate(listed):
        function = spec.get("function") if isinstance(spec, dict) else None
        if not isinstance(function, dict) or spec.get("type") != "function":
            raise Refusal("unsupported", f"tools[{index}]: only functions are served")
        if not isinstance(function.get("name"), str):
            raise Refusal("invalid", f"tools[{index}].function.name: missing")
        tools.append(Tool(function["name"], spec))
    return tuple(tools)


def _max_tokens(value: dict[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        found = value.get(name)
        if found is not None:
            if isinstance(found, bool) or not isinstance(found, int) or found < 1:
                raise Refusal("invalid", f"{name}: a positive number is needed")
            return found
    return None


def _stops(value: Any) -> tuple[str, ...]:
    listed = [value] if isinstance(value, str) else value or []
    if not isinstance(listed, list) or not all(isinstance(stop, str) for stop in listed):
        raise Refusal("invalid", "stop: text or a list of texts is needed")
    return tuple(stop for stop in listed if stop)
