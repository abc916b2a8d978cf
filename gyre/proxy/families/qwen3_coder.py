"""Qwen3-Coder's and Qwen3.5's template families: ChatML with tool calls in XML.

They differ from Qwen3 in how a call is written, and Qwen3.5 in that its template refuses a system message anywhere but
at the start: a late one is rendered as a user's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gyre.proxy.conversation import Message, Tool
from gyre.proxy.families.qwen3 import Qwen3
from gyre.proxy.parser import Parsed, parse
from gyre.proxy.parser_xml import xml_calls


class Qwen3Coder(Qwen3):
    """See `Family`."""

    name = "qwen3-coder"

    def parse(self, output: str, thinking_open: bool, tools: Sequence[Tool] = ()) -> Parsed:
        return parse(output, thinking_open=thinking_open, call_at=xml_calls(tools))


class Qwen35(Qwen3Coder):
    """See `Family`."""

    name = "qwen3.5"

    def message(self, message: Message) -> dict[str, Any]:
        rendered = super().message(message)
        # The system prompt is no message here, so any system message is a late one.
        return {**rendered, "role": "user"} if message.role == "system" else rendered
