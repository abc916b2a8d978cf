"""The conversation that the `shell` harness holds, as messages, text and tokens with targets.

Invariant: the targets are exactly the assistant's tokens, end marker included, and every piece is tokenised by
itself, as the proxy does it: what the warm start teaches is token for token what the engine is asked for later.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jinja2.sandbox
from tokenizers import Tokenizer

from gyre.executions.harnesses.shell_prompt import SYSTEM, TOOL

Message = dict[str, Any]

END = "<|im_end|>"
OPENING = "<|im_start|>assistant\n"
TEMPLATE = Path(__file__).with_name("chat_template.jinja")


@functools.cache
def template() -> jinja2.Template:
    """The chat template; JSON is written as transformers writes it (", " and ": ", keys in their order)."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(TEMPLATE.read_text())


def opening(instruction: str) -> list[Message]:
    """What the harness sends first."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": instruction}]


def tool_call(command: str) -> Message:
    """An assistant message that calls bash."""
    function = {"name": "bash", "arguments": {"command": command}}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def tool_call_text(command: str) -> str:
    """That call as the model writes it."""
    return pieces([*opening(""), tool_call(command)])[-1][0].removesuffix(END)


def render(messages: list[Message], *, generate: bool = False) -> str:
    """The text of `messages`; with `generate`, up to where the assistant goes on."""
    return template().render(messages=messages, tools=[TOOL], add_generation_prompt=generate)


def pieces(messages: list[Message]) -> list[tuple[str, bool]]:
    """The text of `messages` cut into (text, is it a target): context and assistant output by turns."""
    result: list[tuple[str, bool]] = []
    written = ""
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(messages[:index], generate=True)
        through = render(messages[: index + 1]).removesuffix("\n")
        if not (before.startswith(written) and through.startswith(before) and through.endswith(END)):
            raise ValueError("the chat template does not extend its own text turn by turn")
        result += [(before[len(written) :], False), (through[len(before) :], True)]
        written = through
    return result


def encode(tokenizer: Tokenizer, messages: list[Message]) -> tuple[list[int], list[bool]]:
    """Token ids of `messages` up to the last assistant's end marker, and for each whether it is a target."""
    ids: list[int] = []
    targets: list[bool] = []
    for text, is_target in pieces(messages):
        piece = tokenizer.encode(text, add_special_tokens=False).ids
        ids += piece
        targets += [is_target] * len(piece)
    return ids, targets
