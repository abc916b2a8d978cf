"""Tool calls in XML and Llama's JSON: tolerant, exact about white space, typed by the tools' schemas."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, strategies as st

from gyre.proxy.conversation import Tool
from gyre.proxy.families import family

CODER, LLAMA = family("qwen3-coder"), family("llama3")
PROPERTIES = {
    "text": {"type": "string"},
    "maybe": {"type": ["string", "null"]},
    "either": {"anyOf": [{"type": "string"}, {}]},
    "mode": {"enum": ["a", "1"]},
    "count": {"type": "integer"},
    "flag": {"type": "boolean"},
    "list": {"type": "array"},
}
TOOLS = (Tool("write", {"function": {"name": "write", "parameters": {"properties": PROPERTIES}}}),)
SNIPPETS = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<function=write>",
        "</function>",
        "<parameter=text>",
        "</parameter>",
        "\n",
        "<think>",
        "</think>",
        "1",
        '{"name": "write", "parameters": {}}',
        "<parameter=",
        "<function=",
        "<|python_tag|>",
    ]
)


def write(name: str, **values: str) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


@given(st.lists(SNIPPETS | st.text(max_size=8), max_size=14).map("".join), st.booleans())
@example("<tool_call><function=a><parameter=b>" + "[" * 100_000 + "</parameter></function></tool_call>", False)
@example("<tool_call><function=a><parameter=b>" + "9" * 5000 + "</parameter></function></tool_call>", False)
@example('{"name": "a", "parameters": ' + "[" * 100_000, False)
@example('{"name": ["a"], "parameters": {}}', False)
def test_any_text_parses(text, thinking_open):
    for rules in (CODER, LLAMA):
        parsed = rules.parse(text, thinking_open, TOOLS)
        for call in parsed.calls:
            assert isinstance(json.loads(call.arguments), dict)
        assert len(parsed.calls) + parsed.malformed <= max(text.count("<tool_call>"), 1)


@given(st.dictionaries(st.sampled_from(["text", "maybe", "either", "mode"]), st.text(st.characters(codec="utf-8"))))
def test_text_is_kept_as_it_is(values):
    values = {key: value for key, value in values.items() if "</parameter>" not in value}
    parsed = CODER.parse("I write.\n" + write("write", **values), False, TOOLS)
    assert parsed.text == "I write."
    assert [(call.name, json.loads(call.arguments)) for call in parsed.calls] == [("write", values)]


def test_indentation_and_closing_tags_inside_a_value():
    code = "    def f():\n        return '</parameter>'\n\n# </tool_call></function>\n"
    (call,) = CODER.parse(write("write", text=code), False, TOOLS).calls
    assert json.loads(call.arguments) == {"text": code}


def test_values_by_schema():
    given = {
        "text": "5",
        "maybe": "null",
        "mode": "1",
        "count": "5",
        "flag": "True",
        "list": '["a", 1]',
        "other": "1.5",
    }
    (call,) = CODER.parse(write("write", **given), False, TOOLS).calls
    found = {"text": "5", "maybe": "null", "mode": "1", "count": 5, "flag": True, "list": ["a", 1], "other": 1.5}
    assert json.loads(call.arguments) == found
    (call,) = CODER.parse(write("write", count="many", list="[1"), False, TOOLS).calls
    assert json.loads(call.arguments) == {"count": "many", "list": "[1"}


@pytest.mark.parametrize(
    "text",
    [
        write("write", text="a").replace("</function>\n", ""),
        write("write", text="a").replace("</parameter>\n", ""),
        write("write", text="a").replace("</tool_call>", ""),
        "<tool_call>\n" + '{"name": "write", "arguments": {}}' + "\n</tool_call>",
    ],
)
def test_malformed_calls_stay_text_and_are_counted(text):
    parsed = CODER.parse("I try.\n" + text, False, TOOLS)
    assert (parsed.text, parsed.calls, parsed.malformed) == ("I try.\n" + text.rstrip("\n"), (), 1)


def test_llama_calls_are_the_whole_reply():
    (call,) = LLAMA.parse('<|python_tag|>{"name": "write", "parameters": {"text": " a"}}', False).calls
    assert (call.name, json.loads(call.arguments)) == ("write", {"text": " a"})
    for text, malformed in (('{"a": 1}', 0), ('{"name": "a", "parameters": [1]}', 1), ('{"name": "a"', 1), ("{no", 0)):
        parsed = LLAMA.parse(text, False)
        assert (parsed.text, parsed.calls, parsed.malformed) == (text, (), malformed)
