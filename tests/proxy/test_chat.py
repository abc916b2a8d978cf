"""The official client against the proxy: replies, streams, errors, history."""

from __future__ import annotations

import json

import openai
import pytest

TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}]
ASK = [{"role": "system", "content": "Be a coding agent."}, {"role": "user", "content": "List the files."}]
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls", "timeout": 5}}\n</tool_call>'


async def ask(world, messages, **more):
    return await world.client().chat.completions.create(model="tiny", messages=messages, tools=TOOLS, **more)


async def test_a_conversation_with_a_tool_keeps_its_tokens(world):
    world.engine.say("I look.\n" + CALL)
    world.engine.say("Two files.")
    first = await ask(world, ASK)
    choice = first.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
    call = choice.message.tool_calls[0]
    assert json.loads(call.function.arguments) == {"command": "ls", "timeout": 5}
    assert first.usage.prompt_tokens == len(world.sent())
    assert first.usage.prompt_tokens_details.cached_tokens == 7
    prompt = world.sent()

    # The harness re-orders keys and moves white space: the recorded tokens stand for it.
    echo = choice.message.model_dump(exclude_none=True)
    echo["tool_calls"][0]["function"]["arguments"] = '{"timeout":5,  "command":"ls"}'
    echo["content"] = " I look.\n"
    result = {"role": "tool", "tool_call_id": call.id, "content": "a\nb"}
    second = await ask(world, [*ASK, echo, result])
    assert second.choices[0].message.content == "Two files."
    assert second.choices[0].finish_reason == "stop"

    rows = world.sink.rows
    assert [(row.turn, row.parent, row.keep, row.status) for row in rows] == [
        (0, -1, 0, "committed"),
        (1, 0, len(prompt) + len(rows[0].output), "committed"),
    ]
    assert world.sent() == prompt + rows[0].output + rows[1].context
    assert world.renderer.decode(rows[0].output) == "I look.\n" + CALL + "<|im_end|>"
    assert world.renderer.decode(rows[1].context) == (
        "\n<|im_start|>user\n<tool_response>\na\nb\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert [span.version for span in rows[1].spans] == [1]
    assert rows[0].temperature == 0.8
    assert world.engine.requests[0].temperature == 0.8


async def test_streaming_gives_the_same(world):
    world.engine.say("I look.\n" + CALL)
    async with world.client().chat.completions.stream(
        model="tiny", messages=ASK, tools=TOOLS, stream_options={"include_usage": True}
    ) as stream:
        final = await stream.get_final_completion()
    message = final.choices[0].message
    assert (message.role, message.content, final.choices[0].finish_reason) == ("assistant", "I look.", "tool_calls")
    assert message.tool_calls[0].function.name == "bash"
    assert final.usage.completion_tokens == len(world.sink.rows[0].output)
    assert world.sink.rows[0].status == "committed"


async def test_stream_begins_with_life_when_the_reply_is_late(worlds, renderer):
    import asyncio

    world = await worlds(renderer, keep_alive=0.01)
    gate = asyncio.Event()
    world.engine.say("late", gate=gate)
    chunks = []
    async for chunk in await world.client().chat.completions.create(model="tiny", messages=ASK, stream=True):
        chunks.append(chunk)
        gate.set()
    assert chunks[0].choices[0].delta.content is None
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "late"
    assert len({chunk.id for chunk in chunks}) == 1


async def test_failure_after_the_stream_began_is_an_event(worlds, renderer):
    world = await worlds(renderer, keep_alive=0.01, call_seconds=0.2)
    world.serve("cell-0", None)
    with pytest.raises(openai.APIError, match="too long"):
        async for _ in await world.client().chat.completions.create(model="tiny", messages=ASK, stream=True):
            pass
    assert world.capture.stats.server_errors == 1
    assert world.sink.rows == []


async def test_sampling_wishes_are_recorded_and_ignored(world):
    await ask(world, ASK, temperature=0.1, top_p=0.5)
    assert world.engine.requests[0].temperature == 0.8
    assert json.loads(world.sink.rows[0].evidence) == {"asked": {"temperature": 0.1, "top_p": 0.5}}


async def test_thinking_goes_back_apart(worlds, renderers):
    world = await worlds(renderers["thinking"])
    world.engine.say("hm\n</think>\n\nyes")
    first = await ask(world, ASK)
    assert first.choices[0].message.reasoning_content == "hm"
    assert first.choices[0].message.content == "yes"
    # The harness drops the reasoning: the recorded tokens still hold it.
    await ask(world, [*ASK, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "sure?"}])
    assert world.sent()[: len(world.whole(0))] == world.whole(0)
    assert "hm\n</think>" in world.renderer.decode(world.sent())


async def test_malformed_call_stays_text(world):
    world.engine.say("<tool_call>\n{oops}\n</tool_call>")
    reply = await ask(world, ASK)
    assert reply.choices[0].message.content == "<tool_call>\n{oops}\n</tool_call>"
    assert reply.choices[0].message.tool_calls is None
    assert world.capture.stats.malformed_calls == 1


async def test_length_cut_turn_is_closed_by_the_next_tail(world):
    world.engine.say("one two three four five six")
    first = await ask(world, ASK, max_tokens=4)
    assert first.choices[0].finish_reason == "length"
    row = world.sink.rows[0]
    assert len(row.output) == 4
    echo = {"role": "assistant", "content": first.choices[0].message.content}
    await ask(world, [*ASK, echo, {"role": "user", "content": "go on"}])
    follow = world.sink.rows[1]
    assert (follow.parent, follow.keep) == (0, len(row.context) + 4)
    assert follow.context[0] == world.renderer.end_id
    assert world.sent() == row.context + row.output + follow.context


async def test_stop_strings_cut_the_text_and_keep_the_tokens(world):
    world.engine.say("alpha beta STOP gamma delta", chunk=2)
    reply = await ask(world, ASK, stop=["STOP"])
    assert reply.choices[0].message.content == "alpha beta "
    assert reply.choices[0].finish_reason == "stop"
    row = world.sink.rows[0]
    assert world.renderer.decode(row.output) == "alpha beta STOP"
    assert len(row.logprobs) == len(row.output) == sum(span.length for span in row.spans)
    assert world.engine.closed_early == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "image_url"),
        ({"messages": []}, "at least one"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "robot"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "tool_call_id"),
        ({"n": 2}, "one choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": True}, "logprobs"),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\]"),
    ],
)
async def test_what_cannot_be_represented_is_refused(world, change, words):
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        await world.client().chat.completions.create(**{"model": "tiny", "messages": ASK, **change})
    assert caught.value.type == "invalid_request_error"
    assert world.engine.requests == []
    assert (world.sink.rows, world.capture.stats.refused) == ([], 1)


async def test_over_long_prompt(worlds, renderer):
    world = await worlds(renderer, context=50)
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(world, ASK)
    assert caught.value.code == "context_length_exceeded"
    assert "maximum context length is 50 tokens" in str(caught.value)
    assert world.sink.rows == []
    assert world.capture.stats.server_errors == 0


async def test_limits(worlds, renderer):
    world = await worlds(renderer, calls=2, body_bytes=10_000)
    status, answer = await world.post({"messages": [{"role": "user", "content": "x" * 20_000}]})
    assert (status, answer["error"]["code"]) == (413, "request_too_large")
    await ask(world, ASK)
    await ask(world, [{"role": "user", "content": "other"}])
    with pytest.raises(openai.PermissionDeniedError) as caught:
        await ask(world, [{"role": "user", "content": "third"}])
    assert caught.value.code == "execution_limit_reached"


async def test_token_budget_of_the_execution(worlds, renderer):
    world = await worlds(renderer, tokens=5)
    world.engine.say("one two three four five six")
    assert (await ask(world, ASK)).usage.completion_tokens == 5
    with pytest.raises(openai.PermissionDeniedError, match="sampled its 5 tokens"):
        await ask(world, [{"role": "user", "content": "more"}])


async def test_broken_bodies(world):
    assert (await world.post(b"{"))[0] == 400
    assert (await world.post(b"[]"))[0] == 400
    assert (await world.post(b"\xff\xfe"))[0] == 400
    assert (await world.post(b"[" * 100_000))[0] == 400
    surrogate = b'{"messages": [{"role": "user", "content": "\\ud800 x"}]}'
    assert (await world.post(surrogate))[0] in (200, 400)
