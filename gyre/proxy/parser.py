"""From sampled text to thinking, text and tool calls (in <tool_call> tags: Hermes JSON here, XML in `parser_xml.py`).

Invariant: never raises, whatever the text. A call that is malformed or cut stays text, so the harness sees
what the model wrote, and is counted. A closing tag inside a JSON string does not end the call.
"""

from __future__ import annotations

import json
from collections.abc import Callable
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


CallAt = Callable[[str, int], "tuple[ParsedCall, int] | None"]
"""(text, place behind an opening tag) -> the call and where its closing tag ends; None if it is not one."""


def parse(output: str, *, thinking_open: bool = False, call_at: CallAt | None = None) -> Parsed:
    """Split `output` (without its stop token). `thinking_open`: the prompt ended inside a thinking block."""
    thinking, rest = split_thinking(output, thinking_open)
    read = call_at or _call_at
    pieces: list[str] = []
    calls: list[ParsedCall] = []
    malformed = 0
    at = 0
    while (start := rest.find(OPEN_CALL, at)) >= 0:
        found = read(rest, start + len(OPEN_CALL))
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


def split_thinking(output: str, thinking_open: bool) -> tuple[str, str]:
    """(thinking, the rest)."""
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
    at = skip_space(text, at)
    try:
        value, end = DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None
    end = skip_space(text, end)
    if not text.startswith(CLOSE_CALL, end):
        return None
    call = call_of(value)
    return None if call is None else (call, end + len(CLOSE_CALL))


def call_of(value: Any) -> ParsedCall | None:
    """The call that a JSON value is, or None."""
    if not isinstance(value, dict):
        return None
    name, arguments = value.get("name"), value.get("arguments", {})
    try:
        if isinstance(arguments, str):
            arguments = DECODER.decode(arguments)
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            return None
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        # A lone surrogate is JSON but not Unicode: no reply could carry it.
        written.encode()
        name.encode()
    except (ValueError, RecursionError):
        return None
    return ParsedCall(name, written)


def skip_space(text: str, at: int) -> int:
    """The first place from `at` on that holds no white space."""
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


DECODER = json.JSONDecoder(parse_constant=_refuse)
"""Strict JSON: NaN and Infinity are none."""
