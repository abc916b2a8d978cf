"""The tiny model's chat template writes exactly the text that the model is warmed on."""

from __future__ import annotations

import json

import pytest

from gyre.executions.harnesses.shell_prompt import SYSTEM, TOOL
from recipes.tiny_model.conversation import opening, pieces, render, tool_call, tool_call_text

SYSTEM_BLOCK = f"<|im_start|>system\n{SYSTEM}\n\n# Tools\n\n<tools>\n{json.dumps(TOOL)}\n</tools><|im_end|>\n"
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "sort a.txt > b.txt"}}\n</tool_call>'
RESULT = {"role": "tool", "content": "ok"}


def test_opening_ends_where_the_assistant_begins() -> None:
    expected = SYSTEM_BLOCK + "<|im_start|>user\nSort it.<|im_end|>\n<|im_start|>assistant\n"
    assert render(opening("Sort it."), generate=True) == expected


def test_call_and_result() -> None:
    text = render([*opening("Sort it."), tool_call("sort a.txt > b.txt"), RESULT], generate=True)
    tail = text.removeprefix(SYSTEM_BLOCK + "<|im_start|>user\nSort it.<|im_end|>\n")
    assert tail == (
        f"<|im_start|>assistant\n{CALL}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nok\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert tool_call_text("sort a.txt > b.txt") == CALL


def test_results_of_one_round_share_a_user_block() -> None:
    call = tool_call("ls")
    both = call | {"content": "first", "tool_calls": call["tool_calls"] * 2}
    text = render([*opening("Go."), both, RESULT, RESULT | {"content": "a\nb"}, {"role": "assistant", "content": "x"}])
    assert text.endswith(
        "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\nok\n</tool_response>\n"
        "<tool_response>\na\nb\n</tool_response><|im_end|>\n<|im_start|>assistant\nx<|im_end|>\n"
    )
    assert "assistant\nfirst\n<tool_call>" in text
    assert "</tool_call>\n<tool_call>" in text


@pytest.mark.parametrize("content", [None, "", []])
def test_an_empty_content_writes_nothing(content: object) -> None:
    text = render([*opening("Go."), tool_call("ls") | {"content": content}])
    assert "<|im_start|>assistant\n<tool_call>\n" in text


def test_content_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert "<|im_start|>user\none two<|im_end|>\n" in render([{"role": "user", "content": parts}])


def test_arguments_given_as_text_pass_through() -> None:
    call = tool_call("unused")
    call["tool_calls"][0]["function"]["arguments"] = '{"command":   "é < \\"b\\""}'
    expected = '{"name": "bash", "arguments": {"command":   "é < \\"b\\""}}\n</tool_call>'
    assert expected in render([*opening("Go."), call])


def test_arguments_given_as_object_are_plain_json() -> None:
    assert '{"command": "echo \\"é\\" <a >b & c\'"}' in render([*opening("Go."), tool_call('echo "é" <a >b & c\'')])


def test_pieces_cover_the_text_and_mark_the_assistant() -> None:
    messages = [
        *opening("Sort it."),
        tool_call("sort a.txt > b.txt"),
        RESULT,
        {"role": "assistant", "content": "done"},
    ]
    cut = pieces(messages)
    assert "".join(text for text, _ in cut) + "\n" == render(messages)
    assert [text for text, is_target in cut if is_target] == [CALL + "<|im_end|>", "done<|im_end|>"]
