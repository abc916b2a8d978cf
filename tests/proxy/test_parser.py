"""The parser never raises, and reads back what is well formed."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, strategies as st

from gyre.proxy.parser import ParsedCall, parse

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    LEAVES | st.text(max_size=20), lambda v: st.lists(v, max_size=3) | st.dictionaries(NAMES, v, max_size=3)
)
SNIPPETS = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<think>", "</think>", '{"name": "a", "arguments": {}}', '{"name"', "\n", '"', "\\"]
)


@given(st.lists(SNIPPETS | st.text(max_size=8), max_size=12).map("".join), st.booleans())
@example("<tool_call>" + "[" * 100_000, False)
@example('<tool_call>{"name": "x", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>", False)
@example('<tool_call>{"name": "x", "arguments": {"a": "\\ud800"}}</tool_call>', False)
@example('<tool_call>{"name": "x", "arguments": {"a": 1e999}}</tool_call>', False)
def test_any_text_parses(text, thinking_open):
    parsed = parse(text, thinking_open=thinking_open)
    parsed.text.encode("utf-8", "surrogatepass")
    for call in parsed.calls:
        assert isinstance(json.loads(call.arguments), dict)
        call.arguments.encode()
    # Every opening tag is either a call, or text, or inside something else.
    assert len(parsed.calls) + parsed.malformed <= text.count("<tool_call>")


def write(name: str, arguments: dict) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) + "\n</tool_call>"


@given(
    st.text(st.characters(exclude_characters="<"), max_size=30).map(lambda t: t.strip("\n")),
    st.lists(st.tuples(NAMES, st.dictionaries(NAMES, VALUES, max_size=3)), max_size=3),
    st.text(st.characters(exclude_characters="<"), max_size=30).map(lambda t: t.strip("\n")),
)
def test_well_formed_replies_round_trip(said, calls, thinking):
    output = f"<think>\n{thinking}\n</think>\n\n" + "\n".join([*([said] if said else []), *(write(*c) for c in calls)])
    parsed = parse(output)
    assert parsed.thinking == thinking
    assert parsed.text == (said if said.strip() or not calls else "")
    assert [(call.name, json.loads(call.arguments)) for call in parsed.calls] == calls
    assert parsed.malformed == 0


def test_closing_tag_inside_a_string():
    parsed = parse(write("bash", {"command": "echo '</tool_call>'"}))
    assert parsed.calls == (ParsedCall("bash", '{"command": "echo \'</tool_call>\'"}'),)
    assert parsed.text == ""


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}\n</tool_call>',
        '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}',
        '<tool_call>\n{"name": 3, "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "bash", "arguments": [1]}\n</tool_call>',
        "<tool_call>\nls\n</tool_call>",
    ],
)
def test_malformed_calls_stay_text_and_are_counted(text):
    parsed = parse("I try.\n" + text)
    assert parsed.text == "I try.\n" + text
    assert parsed.calls == ()
    assert parsed.malformed == 1


def test_thinking_that_the_prompt_opened():
    parsed = parse("hm\n</think>\n\nyes", thinking_open=True)
    assert (parsed.thinking, parsed.text) == ("hm", "yes")
    cut = parse("hm <tool_call>", thinking_open=True)
    assert (cut.thinking, cut.text, cut.malformed) == ("hm <tool_call>", "", 0)


def test_arguments_given_as_text():
    parsed = parse('<tool_call>{"name": "a", "arguments": "{\\"b\\": 1}"}</tool_call>')
    assert parsed.calls == (ParsedCall("a", '{"b": 1}'),)
