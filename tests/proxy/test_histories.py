"""Reading a request on from earlier ones gives what reading it anew gives, whatever was done to the history."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from gyre.proxy.dialects import DIALECTS
from gyre.proxy.exchange import Refusal, Request
from gyre.proxy.histories import Histories, split

PATHS = {"messages": "/v1/messages", "chat": "/v1/chat/completions", "responses": "/v1/responses"}
TEXT = st.text(max_size=6)
IDS = st.sampled_from(["a", "b", "c"])


def message_items(text: str, name: str) -> list[list[Any]]:
    """What may be added to a history of the Messages dialect, a round at a time."""
    use = [{"type": "tool_use", "id": i, "name": "Bash", "input": {"command": text}} for i in ("a", "b", "c")]
    back = [{"type": "tool_result", "tool_use_id": i, "content": text + i} for i in ("c", name, "b")]
    return [
        [{"role": "user", "content": text}],
        [{"role": "user", "content": [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]}],
        [{"role": "assistant", "content": use}, {"role": "user", "content": back}],
        [{"role": "user", "content": back[:1]}],
        [{"role": "assistant", "content": [{"type": "thinking", "thinking": text, "signature": name}]}],
    ]


def chat_items(text: str, name: str) -> list[list[Any]]:
    function = {"name": "bash", "arguments": json.dumps({"command": text})}
    calls = [{"id": i, "type": "function", "function": function} for i in ("a", "b", "c")]
    back = [{"role": "tool", "tool_call_id": i, "content": text + i} for i in ("c", name, "b")]
    return [
        [{"role": "user", "content": text}],
        [{"role": "assistant", "content": None, "tool_calls": calls}, *back],
        back[:1],
        [{"role": "system", "content": text}],
        [{"role": "assistant", "content": text, "reasoning_content": name}],
    ]


def response_items(text: str, name: str) -> list[list[Any]]:
    calls = [
        {"type": "function_call", "call_id": i, "name": "sh", "arguments": text, "id": f"fc_{name}_1"} for i in "abc"
    ]
    back = [{"type": "function_call_output", "call_id": i, "output": text + i} for i in ("c", name, "b")]
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
    return [
        [{"type": "message", "role": "user", "content": text}],
        [{"type": "reasoning", "summary": [], "encrypted_content": name, "content": None}, *calls, *back],
        back[:1],
        [{**said, "id": f"msg_{name}_0"}],
        calls[:1],
    ]


ITEMS = {"messages": message_items, "chat": chat_items, "responses": response_items}
ACTIONS = st.sampled_from(["add", "add", "add", "edit", "drop", "cut", "swap", "again"])
STEPS = st.lists(st.tuples(ACTIONS, st.integers(0, 4), TEXT, IDS, st.integers(0, 10_000)), min_size=1, max_size=12)


def change(history: list[Any], action: str, added: list[Any], seed: int) -> None:
    at = random.Random(seed).randrange(len(history) + 1)
    if action == "edit" and history:
        history[at - 1 : at] = added
    elif action == "drop":
        del history[at : at + 1]
    elif action == "cut":
        del history[at:]
    elif action == "swap" and len(history) > 1:
        history[0], history[-1] = history[-1], history[0]
    if action == "add" or not history:
        history += added


def outcome(dialect: Any, body: bytes, histories: Histories) -> Any:
    try:
        return dialect.read(body, histories)
    except Refusal as refusal:
        return refusal.kind, str(refusal)


@pytest.mark.parametrize("name", list(PATHS))
@settings(max_examples=150, deadline=None)
@given(steps=STEPS, most=st.integers(1, 4))
def test_memory_changes_nothing(name, steps, most):
    dialect, histories = DIALECTS[PATHS[name]], Histories(most)
    for_items = ITEMS[name]
    threads: list[list[Any]] = [[], []]
    bodies: dict[bytes, str] = {}
    for action, kind, text, call, seed in steps:
        # Two conversations take turns, so that neither is always the newest.
        history = threads[seed % 2]
        change(history, action, for_items(text, call)[kind], seed)
        field = "input" if name == "responses" else "messages"
        tools = [] if name != "messages" else [{"name": f"t{seed % 3}", "input_schema": {}}]
        body = json.dumps({"model": "m", "tools": tools, field: history, "max_tokens": 5}).encode()
        read = outcome(dialect, body, histories)
        assert read == outcome(dialect, body, Histories())
        # Equal bodies are one request, others are not.
        if isinstance(read, Request):
            assert bodies.setdefault(read.identity, body.decode()) == body.decode()


PIECES = [b"", b" ", b",", b", ", b"]", b"}", b'"', b"1", b"null", b"[", b'{"role": "user", "content": "x"}', b"\xff"]
PIECES += [b', "messages": []', b', "messages": [{"role": "user", "content": "y"}]', b'"a": [], ', b"\\"]


@settings(max_examples=400, deadline=None)
@given(
    at=st.floats(0, 1), cut=st.integers(0, 3), piece=st.sampled_from(PIECES), near=st.sampled_from([None, b"}", b"]"])
)
def test_no_bytes_deceive_the_memory(at, cut, piece, near):
    rounds = [{"role": "user", "content": f"question {n}"} for n in range(4)]
    body = json.dumps({"max_tokens": 5, "messages": rounds, "model": "m"}).encode()
    place = int(at * len(body))
    if near is not None:
        # What follows an item is where it matters.
        place = body.find(near, place) + 1
    other = body[:place] + piece + body[place + cut :]
    dialect, histories = DIALECTS[PATHS["messages"]], Histories()
    dialect.read(body, histories)
    for sent in (other, body, other):
        assert outcome(dialect, sent, histories) == outcome(dialect, sent, Histories())


@pytest.mark.parametrize(
    ("body", "fields", "items"),
    [
        (b'{"a": 1, "x": [1, {"b": 2} ], "c": []}', {"a": b"1", "x": b"[ ]", "c": b"[]"}, [b"1", b'{"b": 2}']),
        (b' {"x":["[\\"x\\":"]} ', {"x": b"[]"}, [b'"[\\"x\\":"']),
        (b'{"x": [1], "x": [2, 3]}', {"x": b"[]"}, [b"2", b"3"]),
        (b'{"x": []}', {"x": b"[]"}, []),
        (b'{"x": null}', {"x": b"null"}, []),
        (b'{"y": 1}', {"y": b"1"}, []),
    ],
)
def test_a_body_is_split_around_its_items(body, fields, items):
    found, listed, spans = split(body, "x")
    assert {name: bytes(raw) for name, raw in found.items()} == fields
    assert [bytes(raw) for raw in listed] == items
    assert [body[start:end] for start, end in spans] == items


@pytest.mark.parametrize("body", [b"", b"[1]", b'{"x": [1', b'{"x": 1}', b'{"x": {}}', b'{"x": [1]} 2', b'{"x": [1,]}'])
def test_a_body_that_cannot_be_split_is_refused(body):
    with pytest.raises(Refusal):
        split(body, "x")


def test_a_text_may_stand_for_its_item():
    fields = DIALECTS["/v1/responses"].read(b'{"input": "a \\"b\\""}')
    assert fields.conversation.messages[0].text == 'a "b"'


def test_of_two_lists_of_one_name_the_last_counts():
    one, two, three, four = (json.dumps({"role": "user", "content": text}).encode() for text in "abcd")
    dialect, histories = DIALECTS[PATHS["messages"]], Histories()
    dialect.read(b'{"messages": [' + one + b", " + two + b"]}", histories)
    twice = b'{"messages": [' + one + b", " + three + b'], "messages": [' + four + b"]}"
    assert [message.text for message in dialect.read(twice, histories).conversation.messages] == ["d"]
