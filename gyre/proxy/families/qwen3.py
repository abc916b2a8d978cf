"""Qwen3's template family: ChatML, Hermes tool calls, reasoning in <think>.

The rules rest on what the template does: the end of turn is `<|im_end|>`, followed by a newline that the
model never samples; reasoning is rendered only after the last user query, so a placeholder carries reasoning
too (without it the template would add an empty think block to the last assistant message, and the text before
a tail would change).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from gyre.proxy.conversation import Conversation, Message, Tool, ToolCall
from gyre.proxy.parser import Parsed, parse


class Qwen3:
    """See `Family`."""

    name = "qwen3"
    begin = ""
    header = "<|im_start|>assistant\n"
    one_call = False
    end_of_turn = "<|im_end|>"
    other_stops: tuple[str, ...] = ("<|endoftext|>",)
    required: tuple[str, ...] = ("<|im_start|>", "<|im_end|>")

    def messages(self, conversation: Conversation) -> list[dict[str, Any]]:
        opening = [] if conversation.system is None else [{"role": "system", "content": conversation.system}]
        return opening + [self.message(message) for message in conversation.messages]

    def message(self, message: Message) -> dict[str, Any]:
        rendered: dict[str, Any] = {"role": message.role, "content": message.text}
        if message.thinking:
            rendered["reasoning_content"] = message.thinking
        if message.calls:
            rendered["tool_calls"] = [_call(call) for call in message.calls]
        if message.call_id:
            rendered["tool_call_id"] = message.call_id
        return rendered

    def placeholder(self, mark: str) -> dict[str, Any]:
        return {"role": "assistant", "content": mark, "reasoning_content": "-"}

    def dummy_prefix(self, mark: str) -> list[dict[str, Any]]:
        return [{"role": "user", "content": "-"}, self.placeholder(mark)]

    def region(self, text: str, mark: str) -> tuple[int, int]:
        content = text.index(mark)
        end = content + len(mark) + len(self.end_of_turn)
        if text[content + len(mark) : end] != self.end_of_turn:
            raise ValueError("the template writes something between an assistant's content and its end of turn")
        return text.rindex(self.header, 0, content), end

    def parse(self, output: str, thinking_open: bool, tools: Sequence[Tool] = ()) -> Parsed:
        return parse(output, thinking_open=thinking_open)


def _call(call: ToolCall) -> dict[str, Any]:
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        arguments = call.arguments
    # A string passes through the template as it stands; anything else is written by its JSON filter.
    function = {"name": call.name, "arguments": arguments if isinstance(arguments, dict) else call.arguments}
    return {"type": "function", "id": call.id, "function": function}
