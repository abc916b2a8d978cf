"""From sampled text to thinking, text and tool calls (Hermes JSON in <tool_call> tags).

Invariant: never raises, whatever the text. A call that is malformed or cut stays text, so the harness sees
what the model wrote, and is counted. A closing tag inside a JSON string does not end the call.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

OPEN_CALL, CLOSE_CALL = "<tool_call>", "</tool_call>"
OPEN_THINK, CLOSE_THINK = "<think>", "</think>"
_SPACE = " \t\r\n"


class ParsedCall(msgspec.Struct, frozen=True):
    """A well-formed call: `arguments` is the JSON text of an object."""

    name: str
    arguments: str


class Parsed(msgspec.Struct, frozen=True, kw_only=True):
    """What a reply says. `malformed` counts the calls that stayed text."""

    text: str = ""
    thinking: str = ""
    calls: tuple[ParsedCall, ...] = ()
    malformed: int = 0


def parse(output: str, *, thinking_open: bool = False) -> Parsed:
    """Split `output` (without its stop token). `thinking_open`: the prompt ended inside a thinking block."""
    thinking, rest = _split_thinking(output, thinking_open)
    pieces: list[str] = []
    calls: list[ParsedCall] = []
    malformed = 0
    at = 0
    while (start := rest.find(OPEN_CALL, at)) >= 0:
        found = _call_at(rest, start + len(OPEN_CALL))
        if found is None:
            malformed += 1
            end = start + len(OPEN_CALL)
            pieces.append(rest[at:end])
        else:
            call, end = found
            calls.append(call)
            pieces.append(rest[at:start].rstrip("\n") if rest[at:start].strip() else "")
        at = end
    pieces.append(rest[at:] if not calls or rest[at:].strip() else "")
    return Parsed(text="".join(pieces).strip("\n"), thinking=thinking, calls=tuple(calls), malformed=malformed)


def _split_thinking(output: str, thinking_open: bool) -> tuple[str, str]:
    lead = output.lstrip(_SPACE)
    if lead.startswith(OPEN_THINK):
        body = lead[len(OPEN_THINK) :]
    elif thinking_open:
        body = output
    else:
        return "", output
    thinking, _, rest = body.partition(CLOSE_THINK)
    return thinking.strip("\n"), rest.lstrip("\n")


def _call_at(text: str, at: int) -> tuple[ParsedCall, int] | None:
    """The call whose JSON starts at or after `at`, and where its closing tag ends; None if it is not one."""
    at = _skip_space(text, at)
    try:
        value, end = _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None
    end = _skip_space(text, end)
    if not text.startswith(CLOSE_CALL, end):
        return None
    call = _call_of(value)
    return None if call is None else (call, end + len(CLOSE_CALL))


def _call_of(value: Any) -> ParsedCall | None:
    if not isinstance(value, dict):
        return None
    name, arguments = value.get("name"), value.get("arguments", {})
    try:
        if isinstance(arguments, str):
            arguments = _DECODER.decode(arguments)
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            return None
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        # A lone surrogate is JSON but not Unicode: no reply could carry it.
        written.encode()
        name.encode()
    except (ValueError, RecursionError):
        return None
    return ParsedCall(name, written)


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)
