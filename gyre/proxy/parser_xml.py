"""Tool calls as Qwen3-Coder and Qwen3.5 write them: a function of named parameters in tags, each value as it stands.

Invariant: never raises; a value keeps its indentation, and loses exactly the newline behind its opening tag and the one
before its closing tag. A value is text where the tool declares text, else JSON where it is JSON, else text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from gyre.proxy.conversation import Tool
from gyre.proxy.parser import CLOSE_CALL, DECODER, CallAt, ParsedCall, call_of, skip_space

_FUNCTION = re.compile(r"<function=([^<>\n]+)>")
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n?")
_END = re.compile(r"\n?</parameter>\s*(?=<parameter=|</function>)")
"""A closing tag counts only where another tag of the call follows: values may hold one."""
_CLOSE_FUNCTION = "</function>"
_WORDS = {"True": True, "False": False, "None": None}
"""How templates print what is neither text nor a container."""


def xml_calls(tools: Sequence[Tool]) -> CallAt:
    """A reader of calls of `tools`, whose schemas say which parameters are text."""

    def call_at(text: str, at: int) -> tuple[ParsedCall, int] | None:
        opening = _FUNCTION.match(text, skip_space(text, at))
        if opening is None:
            return None
        name = opening[1].strip()
        declared = _declared(tools, name)
        arguments: dict[str, Any] = {}
        at = skip_space(text, opening.end())
        while (parameter := _PARAMETER.match(text, at)) is not None:
            end = _END.search(text, parameter.end())
            if end is None:
                return None
            key = parameter[1].strip()
            arguments[key] = _value(text[parameter.end() : end.start()], declared.get(key))
            at = end.end()
        if not text.startswith(_CLOSE_FUNCTION, at):
            return None
        end_at = skip_space(text, at + len(_CLOSE_FUNCTION))
        call = call_of({"name": name, "arguments": arguments})
        if call is None or not text.startswith(CLOSE_CALL, end_at):
            return None
        return call, end_at + len(CLOSE_CALL)

    return call_at


def _declared(tools: Sequence[Tool], name: str) -> dict[str, Any]:
    for tool in tools:
        if tool.name == name:
            function = tool.spec.get("function")
            schema = function.get("parameters") if isinstance(function, dict) else None
            properties = schema.get("properties") if isinstance(schema, dict) else None
            return properties if isinstance(properties, dict) else {}
    return {}


def _value(written: str, declared: Any) -> Any:
    if _is_text(declared):
        return written
    bare = written.strip()
    if bare in _WORDS:
        return _WORDS[bare]
    try:
        value = DECODER.decode(bare)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return written
    return value


def _is_text(declared: Any) -> bool:
    """Whether a schema allows text."""
    if not isinstance(declared, dict):
        return False
    kinds = declared.get("type")
    if kinds == "string" or (isinstance(kinds, list) and "string" in kinds) or isinstance(declared.get("enum"), list):
        return True
    branches = [*_list(declared.get("anyOf")), *_list(declared.get("oneOf"))]
    return any(isinstance(branch, dict) and branch.get("type") == "string" for branch in branches)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
