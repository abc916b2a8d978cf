"""Llama 3's template family: headers, `<|eot_id|>`, and a tool call that is the whole reply, as JSON.

The template knows one call a turn and no text beside it; the end of turn is followed by nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gyre.proxy.conversation import Message, Tool
from gyre.proxy.families.qwen3 import Qwen3
from gyre.proxy.parser import DECODER, Parsed, call_of

_PYTHON = "<|python_tag|>"


class Llama3(Qwen3):
    """See `Family`."""

    name = "llama3"
    begin = "<|begin_of_text|>"
    end_of_turn = "<|eot_id|>"
    other_stops: tuple[str, ...] = ("<|eom_id|>", "<|end_of_text|>")
    required: tuple[str, ...] = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|begin_of_text|>")
    header = "<|start_header_id|>assistant<|end_header_id|>\n\n"
    one_call = True

    def message(self, message: Message) -> dict[str, Any]:
        rendered = super().message(message)
        rendered.pop("reasoning_content", None)
        return rendered

    def placeholder(self, mark: str) -> dict[str, Any]:
        return {"role": "assistant", "content": mark}

    def parse(self, output: str, thinking_open: bool, tools: Sequence[Tool] = ()) -> Parsed:
        bare = output.strip().removeprefix(_PYTHON).strip()
        if not bare.startswith("{"):
            return Parsed(text=output)
        try:
            value = DECODER.decode(bare)
        except (ValueError, RecursionError):
            return Parsed(text=output, malformed=1 if '"name"' in bare else 0)
        if not isinstance(value, dict) or "name" not in value:
            return Parsed(text=output)
        call = call_of({"arguments": value.get("parameters", value.get("arguments", {})), "name": value["name"]})
        return Parsed(text=output, malformed=1) if call is None else Parsed(calls=(call,))
