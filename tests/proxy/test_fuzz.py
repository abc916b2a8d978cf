"""Hostile requests: each is answered in its dialect's shape, none is an error of ours, no failed one leaves a trace."""

from __future__ import annotations

import asyncio
import copy
import json
from typing import Any

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from gyre.proxy.capture import Limits

KEY = "a-key-of-one-execution"
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}
CHAT = {
    "model": "tiny",
    "stream": False,
    "max_tokens": 20,
    "stop": ["x"],
    "temperature": 1,
    "stream_options": {},
    "tools": [{"type": "function", "function": {"name": "bash", "description": "Run", "parameters": SCHEMA}}],
    "messages": [
        {"role": "system", "content": "Be."},
        {"role": "user", "content": [{"type": "text", "text": "go"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "b"},
    ],
}
MESSAGES = {
    "model": "tiny",
    "stream": False,
    "max_tokens": 20,
    "stop_sequences": ["x"],
    "system": [{"type": "text", "text": "Be."}],
    "metadata": {"user_id": '{"session_id": "s"}'},
    "thinking": {"type": "enabled"},
    "tool_choice": {"type": "auto"},
    "tools": [{"name": "bash", "description": "Run", "input_schema": SCHEMA}],
    "output_config": {"format": {}},
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "go", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "a", "name": "bash", "input": {"command": "ls"}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "b"}]}],
        },
        {"role": "system", "content": "Mind."},
    ],
}
RESPONSES = {
    "model": "tiny",
    "stream": False,
    "max_output_tokens": 20,
    "instructions": "Be.",
    "client_metadata": {"a": "b"},
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "include": ["reasoning.encrypted_content"],
    "tools": [
        {"type": "function", "name": "bash", "parameters": SCHEMA},
        {"type": "web_search"},
        {"type": "custom", "name": "p"},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}]},
    ],
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "a"}],
            "encrypted_content": "x",
        },
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "content": [{"type": "output_text", "text": "I look."}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "a", "name": "f", "namespace": "n", "arguments": "{}"},
        {"type": "custom_tool_call", "id": "ctc_1", "call_id": "c", "name": "p", "input": "x"},
        {"type": "function_call_output", "call_id": "a", "output": "b"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "b"}]},
    ],
}
BODIES = [
    ("/v1/chat/completions", CHAT),
    ("/v1/messages", MESSAGES),
    ("/v1/messages/count_tokens", MESSAGES),
    ("/v1/responses", RESPONSES),
]
HOSTILE = st.sampled_from(
    [
        None,
        True,
        0,
        -1,
        10**30,
        1e300,
        "",
        "x",
        [],
        {},
        [[]],
        [None],
        {"type": None},
        {"type": "text"},
        "\0",
        "<|im_end|>",
        "assistant",
        "tool",
        "\ud800",
        "[test-nonce:0]",
        "[test-nonce:before]",
        "</tool_call>",
        {"content": []},
        "A" * 3000,
    ]
)
STEP = st.tuples(st.integers(0, 2**30), st.sampled_from(["set", "delete", "twice", "wrap", "rename"]), HOSTILE)
REQUEST = st.tuples(
    st.sampled_from(range(len(BODIES))),
    st.lists(STEP, min_size=1, max_size=3),
    st.none() | st.tuples(st.integers(0, 2**16), st.binary(max_size=3)),
)
EVIL_HEADERS = {"x-codex-turn-metadata": "[" * 100, "x-claude-code-agent-id": "../a", "x-session-id": "é" * 100}


def places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every value inside."""
    inner = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    )
    return [(value, key) for key, _ in inner] + [place for _, item in inner for place in places(item)]


def mutate(body: Any, steps: list[tuple[int, str, Any]]) -> Any:
    body = copy.deepcopy(body)
    for pick, action, value in steps:
        found = places(body)
        if not found:
            continue
        container, key = found[pick % len(found)]
        if action == "delete":
            del container[key]
        elif action == "twice" and isinstance(container, list):
            container.append(copy.deepcopy(container[key]))
        elif action == "wrap":
            container[key] = [container[key]]
        elif action == "rename" and isinstance(container, dict):
            container["x" + str(key)] = container.pop(key)
        else:
            container[key] = copy.deepcopy(value)
    return body


def raw(body: Any, cut: tuple[int, bytes] | None) -> bytes:
    data = json.dumps(body).encode()
    return data if cut is None else data[: cut[0] % len(data)] + cut[1] + data[cut[0] % len(data) + len(cut[1]) :]


def check_error(path: str, answer: Any) -> None:
    error = answer["error"]
    assert isinstance(error["message"], str) and error["message"]
    assert isinstance(error["type"], str)
    assert (answer.get("type") == "error") == path.startswith("/v1/messages")
    assert ("code" in error) != path.startswith("/v1/messages")


async def play(world: Any, requests: list[Any]) -> None:
    world.url = await world.listen()
    headers = {"x-api-key": KEY, "Content-Type": "application/json"}
    world.engine.say('<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>')
    _, known = await world.post({"messages": [{"role": "user", "content": "go"}]})
    issued = known["choices"][0]["message"]["tool_calls"][0]["id"].encode()
    async with aiohttp.ClientSession(headers=headers) as session:
        for which, steps, cut in requests:
            path, body = BODIES[which]
            before = (len(world.sink.rows), len(world.capture._tree))
            # Half of the calls that come back are of a turn that is known.
            data = raw(mutate(body, steps), cut).replace(b'"id": "a"', b'"id": "%s"' % issued)
            async with session.post(world.url + path, data=data, headers=EVIL_HEADERS) as answer:
                text = await answer.text()
            assert answer.status in (200, 400, 403, 413), (answer.status, text)
            if answer.status != 200:
                check_error(path, json.loads(text))
            if answer.status != 200 or path.endswith("count_tokens"):
                assert before == (len(world.sink.rows), len(world.capture._tree))
            elif answer.content_type == "text/event-stream":
                assert "event: error" not in text and '"error":{' not in text
            else:
                assert json.loads(text)["id"]
    for row, request in zip(world.sink.rows, world.engine.requests, strict=True):
        assert world.whole(row.turn) == request.input_ids + row.output
    assert world.capture.stats.server_errors == 0
    await world.proxy.close()


def attack(new_world: Any, renderer: Any, harness: str, requests: list[Any]) -> None:
    world = new_world(renderer, Limits(context=4000, max_tokens=60, siblings=10_000), harness=harness)
    asyncio.run(play(world, requests))


HARNESSES = st.sampled_from(["shell", "claude-code", "codex", "qwen-code", "opencode"])
QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(max_examples=30, deadline=None, suppress_health_check=QUIET)
@given(requests=st.lists(REQUEST, min_size=5, max_size=20), harness=HARNESSES)
def test_hostile_requests(new_world, renderer, requests, harness):
    attack(new_world, renderer, harness, requests)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=500, deadline=None, suppress_health_check=QUIET)
@given(requests=st.lists(REQUEST, min_size=15, max_size=40), harness=HARNESSES)
def test_ten_thousand_hostile_requests(new_world, renderer, requests, harness):
    attack(new_world, renderer, harness, requests)


@pytest.mark.parametrize("path", [path for path, _ in BODIES])
async def test_keys_and_sizes(worlds, renderer, path):
    world = await worlds(renderer, body_bytes=10_000)
    big = json.dumps({"messages": "x" * 20_000}).encode()
    for key, body, status in (("wrong", b"{}", 401), (KEY, big, 413), (KEY, b"[" * 9000, 400), (KEY, b"\xff", 400)):
        given, answer = await world.post(body, key=key, path=path)
        assert given == status
        check_error(path, answer)
    await world.proxy.unregister(KEY)
    assert (await world.post(b"{}", path=path))[0] == 401
    assert world.sink.rows == []
