"""Custody: retries, clients that left, twins, siblings, failures, the end of an execution."""

from __future__ import annotations

import asyncio
import contextlib
import json

import aiohttp
import openai
import pytest

from gyre.engines.errors import EngineRefused
from gyre.ledger.turns import Turn
from gyre.ledger.turns_merge import latest_rows

BODY = {"messages": [{"role": "user", "content": "List the files."}]}


def said(answer) -> str:
    return answer["choices"][0]["message"]["content"]


async def leave_early(world, body=BODY) -> None:
    """Send a request and close the connection once the engine has it."""
    task = asyncio.ensure_future(world.post(body))
    await world.engine.started.wait()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def test_identical_request_in_flight_gets_the_same_reply(world):
    gate = asyncio.Event()
    world.engine.say("once", gate=gate)
    both = [asyncio.ensure_future(world.post(BODY)) for _ in range(2)]
    await until(lambda: world.capture.stats.calls == 2)
    gate.set()
    (_, first), (_, second) = await asyncio.gather(*both)
    assert first == second
    assert (len(world.engine.requests), len(world.sink.rows), world.capture.stats.replayed) == (1, 1, 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_left_gets_its_reply_on_retry(worlds, renderer, stream):
    world = await worlds(renderer, keep_alive=0.01)
    gate = asyncio.Event()
    world.engine.say("kept", gate=gate)
    await leave_early(world, {**BODY, "stream": stream})
    gate.set()
    await until(lambda: len(world.sink.rows) == 2)
    assert [row.status for row in world.sink.rows] == ["committed", "undelivered"]
    assert world.capture.stats.undelivered == 1

    async with aiohttp.ClientSession(headers={"x-api-key": "a-key-of-one-execution"}) as session:
        body = json.dumps({**BODY, "stream": stream}).encode()
        async with session.post(world.url + "/v1/chat/completions", data=body) as answer:
            text = await answer.text()
    assert '"content":"kept"' in text
    assert text.endswith("data: [DONE]\n\n") == stream
    assert len(world.engine.requests) == 1
    await until(lambda: len(world.sink.rows) == 3)
    assert [row.status for row in world.sink.rows] == ["committed", "undelivered", "committed"]
    assert [(row.turn, row.status) for row in latest_rows(world.sink.rows)] == [(0, "committed")]
    assert world.capture.stats.undelivered == 0


async def test_row_is_in_the_shard_before_the_reply(world):
    _, answer = await world.post(BODY)
    assert said(answer) == "done"
    assert len(world.sink.rows) == 1


async def test_after_delivery_an_identical_request_samples_a_sibling_up_to_the_cap(worlds, renderer):
    world = await worlds(renderer, siblings=2)
    for text in ("first", "second"):
        world.engine.say(text)
    answers = [said((await world.post(BODY))[1]) for _ in range(4)]
    assert answers == ["first", "second", "second", "second"]
    first, second = world.sink.rows
    prompt = len(first.context)
    assert (second.parent, second.keep, second.context) == (0, prompt, [])
    assert world.whole(1)[:prompt] == world.whole(0)[:prompt] == world.sent(0) == world.sent(1)


async def test_concurrent_side_calls_become_siblings(world):
    world.engine.say("base")
    _, answer = await world.post(BODY)
    history = [*BODY["messages"], {"role": "assistant", "content": said(answer)}]
    gates = [asyncio.Event(), asyncio.Event()]
    for index, gate in enumerate(gates):
        world.engine.say(f"side {index}", gate=gate)
    calls = [
        asyncio.ensure_future(world.post({"messages": [*history, {"role": "user", "content": f"side {index}?"}]}))
        for index in range(2)
    ]
    await until(lambda: len(world.engine.requests) == 3)
    gates[1].set()
    await until(lambda: len(world.sink.rows) == 2)
    gates[0].set()
    answers = await asyncio.gather(*calls)
    assert sorted(said(answer) for _, answer in answers) == ["side 0", "side 1"]
    assert [(row.turn, row.parent) for row in world.sink.rows] == [(0, -1), (1, 0), (2, 0)]
    for number, request in ((1, 2), (2, 1)):
        row = world.sink.rows[number]
        assert world.whole(number) == world.sent(request) + row.output


async def test_failed_call_changes_nothing_and_its_retry_starts_anew(world):
    world.engine.say("never", error=EngineRefused("bad ids", 400))
    status, answer = await world.post(BODY)
    assert (status, answer["error"]["type"]) == (503, "server_error")
    assert "bad ids" in answer["error"]["message"]
    assert (world.sink.rows, world.capture.stats.server_errors) == ([], 1)
    _, answer = await world.post(BODY)
    assert said(answer) == "done"
    assert [(row.turn, row.parent, row.keep) for row in world.sink.rows] == [(0, -1, 0)]


async def test_tokens_of_a_failed_call_are_accounted_as_aborted(world):
    world.engine.say("one two three four", cut=3)
    world.engine.say("", error=EngineRefused("no", 400))
    assert (await world.post(BODY))[0] == 503
    (row,) = world.sink.rows
    assert (row.turn, row.status, row.finish, len(row.output)) == (0, "aborted", "abort", 3)
    await world.post(BODY)
    assert [(row.turn, row.parent, row.keep, row.status) for row in world.sink.rows[1:]] == [(1, -1, 0, "committed")]


async def test_full_disk_is_a_server_error_and_the_tree_is_as_before(world):
    world.sink.full = True
    status, answer = await world.post(BODY)
    assert (status, answer["error"]["type"]) == (503, "server_error")
    world.sink.full = False
    world.engine.say("again")
    assert said((await world.post(BODY))[1]) == "again"
    assert [row.turn for row in world.sink.rows] == [0]


async def test_end_of_an_execution_cuts_and_counts_dangling_calls(world):
    gate = asyncio.Event()
    world.engine.say("never", gate=gate)
    task = asyncio.ensure_future(world.client().chat.completions.create(model="tiny", **BODY))
    await world.engine.started.wait()
    stats = await world.proxy.unregister("a-key-of-one-execution")
    assert stats.dangling == 1
    with pytest.raises(openai.APIError):
        await task
    assert world.sink.rows == []


async def test_history_edits_fork_where_tokens_diverge(world):
    world.engine.say("alpha beta gamma")
    world.engine.say("after edit")
    await world.post(BODY)
    edited = {"role": "assistant", "content": "alpha beta delta"}
    go_on = {"role": "user", "content": "go on"}
    await world.post({"messages": [*BODY["messages"], edited, go_on]})
    first, second = world.sink.rows
    assert second.parent == 0
    assert len(first.context) < second.keep < len(first.context) + len(first.output)
    assert world.whole(1) == world.sent() + second.output
    # The edited history is known now: its next request is a continuation.
    reply = {"role": "assistant", "content": "after edit"}
    await world.post({"messages": [*BODY["messages"], edited, go_on, reply, go_on]})
    third = world.sink.rows[2]
    assert (third.parent, third.keep) == (1, len(world.whole(1)))


async def test_a_dropped_reply_forks_from_the_prompt(world):
    world.engine.say("no tool call")
    await world.post(BODY)
    await world.post({"messages": [*BODY["messages"], {"role": "user", "content": "Format error."}]})
    first, second = world.sink.rows
    # Kept up to the header of the assistant's turn, where a user's turn stands now.
    assert (second.parent, second.keep) == (0, len(first.context) - len(world.renderer.encode("assistant\n")))
    assert world.whole(1) == world.sent() + second.output


async def test_a_turn_kept_after_compaction_is_spliced_with_its_recorded_tokens(world):
    call = '<tool_call>\n{"name": "bash", "arguments": {"b": 1, "a": 2}}\n</tool_call>'
    world.engine.say(call)
    _, answer = await world.post(BODY)
    message = answer["choices"][0]["message"]
    message["tool_calls"][0]["function"]["arguments"] = '{"a":2,"b":1}'
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "ok"}
    summary = {"role": "user", "content": "Summary: files were listed."}
    await world.post({"messages": [summary, message, result]})
    first, second = world.sink.rows
    text = world.renderer.decode(second.context)
    assert '{"b": 1, "a": 2}' in text
    at = next(i for i in range(len(second.context)) if second.context[i : i + len(first.output)] == first.output)
    assert at > 0
    assert world.whole(1) == world.sent() + second.output


async def test_an_edited_call_is_not_taken_for_ours(world):
    world.engine.say('<tool_call>\n{"name": "bash", "arguments": {"command": "rm a"}}\n</tool_call>')
    _, answer = await world.post(BODY)
    message = answer["choices"][0]["message"]
    message["tool_calls"][0]["function"]["arguments"] = '{"command": "ls"}'
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "ok"}
    await world.post({"messages": [*BODY["messages"], message, result]})
    assert "rm a" not in world.renderer.decode(world.sent())
    assert world.sink.rows[1].keep < len(world.whole(0))


def test_latest_rows():
    base = {"execution": "g", "attempt": 0}
    rows = [
        Turn(**base, turn=0, context=[1, 2], output=[3]),
        Turn(**base, turn=1, parent=0, keep=3, context=[4], output=[5]),
        Turn(**base, turn=0, context=[1, 2], output=[3], status="undelivered"),
        Turn(**base, turn=2, parent=0, keep=2, output=[6]),
        Turn(**base, turn=2, parent=0, keep=2, output=[6], status="undelivered"),
        Turn(**base, turn=3, parent=2, keep=3, context=[7], output=[8], status="aborted"),
    ]
    merged = latest_rows(rows)
    # Turn 1 keeps the whole of turn 0, so it was received; so was turn 2, though the call that shows it failed.
    assert [(row.turn, row.status) for row in merged] == [
        (0, "committed"),
        (1, "committed"),
        (2, "committed"),
        (3, "aborted"),
    ]


async def test_a_call_that_was_cut_between_sessions_is_sampled_anew_by_the_next(world):
    """The next session may begin with the very same request."""
    world.engine.say("never", gate=asyncio.Event())
    lost = asyncio.ensure_future(world.post(BODY))
    await world.engine.started.wait()
    await world.proxy.pause("a-key-of-one-execution")
    assert (world.capture.stats.dangling, world.capture.stats.server_errors) == (1, 0)
    await asyncio.gather(lost, return_exceptions=True)
    world.proxy.resume("a-key-of-one-execution")
    world.engine.say("anew")
    assert said((await world.post(BODY))[1]) == "anew"
    assert (world.capture.stats.replayed, world.capture.stats.turns) == (0, 1)
