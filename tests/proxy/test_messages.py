"""Anthropic Messages: the official client against the proxy; replies, streams, history, errors."""

from __future__ import annotations

import asyncio
import json

import anthropic
import pytest

TOOLS = [{"name": "bash", "description": "Run", "input_schema": {"type": "object", "properties": {}}}]
ASK = [{"role": "user", "content": "List the files."}]
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls", "timeout": 5}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "bash", "arguments": {"command": "pwd"}}\n</tool_call>'
THOUGHT = f"hm\n</think>\n\nI look.\n{CALL}\n{OTHER}"


def body(messages, **more):
    return {"model": "tiny", "max_tokens": 200, "messages": messages, "tools": TOOLS, **more}


async def ask(world, messages, **more):
    return await world.anthropic().messages.create(**body(messages, **more))


async def stream(world, messages, **more):
    async with world.anthropic().messages.stream(**body(messages, **more)) as events:
        return await events.get_final_message()


def answers(message, *outputs):
    """Tool results for a message's calls."""
    ids = [block.id for block in message.content if block.type == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": i, "content": text} for i, text in zip(ids, outputs, strict=True)]
    return {"role": "user", "content": results}


def echo(message):
    return {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in message.content]}


@pytest.mark.parametrize("how", [ask, stream])
async def test_thinking_text_and_parallel_tools(worlds, renderers, how):
    world = await worlds(renderers["thinking"])
    world.engine.say(THOUGHT)
    message = await how(world, ASK, system="Be a coding agent.")
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    thinking, text, first, second = message.content
    assert (thinking.thinking, text.text) == ("hm", "I look.")
    assert thinking.signature in message.id
    assert (first.input, second.input) == ({"command": "ls", "timeout": 5}, {"command": "pwd"})
    assert message.stop_reason == "tool_use"
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (len(world.sent()) - 7, 7)
    assert usage.output_tokens == len(world.sink.rows[0].output)

    # Results come as they complete; the template names them by place: they are put in the order of the calls.
    results = answers(message, "a\nb", "/app")
    results["content"].reverse()
    results["content"].append({"type": "text", "text": "Go on."})
    world.engine.say("done\n</think>\n\nTwo files.")
    await how(world, [*ASK, echo(message), results], system="Be a coding agent.")
    before, row = world.whole(0), world.sink.rows[1]
    assert (row.parent, row.keep) == (0, len(before))
    assert world.sent() == before + row.context
    assert world.renderer.decode(row.context) == (
        "\n<|im_start|>user\n<tool_response>\na\nb\n</tool_response>\n<tool_response>\n/app\n</tool_response><|im_end|>\n"
        "<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )


async def test_a_signature_names_its_turn_whatever_became_of_its_thinking(worlds, renderers):
    world = await worlds(renderers["thinking"])
    world.engine.say("hm\n</think>\n\nyes")
    message = await ask(world, ASK)
    back = {
        "role": "assistant",
        "content": [{**echo(message)["content"][0], "thinking": ""}, {"type": "text", "text": "yes "}],
    }
    await ask(world, [*ASK, back, *ASK])
    assert world.sent()[: len(world.whole(0))] == world.whole(0)


async def test_spelling_does_not_fork(world):
    world.engine.say("I look.\n" + CALL)
    message = await ask(world, ASK)
    marked = {"type": "text", "text": "List the files.", "cache_control": {"type": "ephemeral"}}
    back = echo(message)
    back["content"] = [{"type": "text", "text": "\n"}, *back["content"]]
    back["content"][2]["input"] = {"timeout": 5, "command": "ls"}
    tools = [{**TOOLS[0], "cache_control": {"type": "ephemeral"}}]
    history = [{"role": "user", "content": [marked]}, back, answers(message, "a")]
    await ask(world, history, tools=tools)
    assert (world.sink.rows[1].parent, world.sink.rows[1].keep) == (0, len(world.whole(0)))


async def test_system_blocks_billing_and_late_system_messages(world):
    blocks = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=123;"},
        {"type": "text", "text": "Be an agent.", "cache_control": {"type": "ephemeral"}},
    ]
    await ask(world, [*ASK, {"role": "system", "content": "Be brief."}], system=blocks)
    text = world.renderer.decode(world.sent())
    assert text.startswith("<|im_start|>system\nBe an agent.")
    assert "<|im_start|>system\nBe brief.<|im_end|>" in text
    assert "billing" not in text


async def test_count_tokens_counts_what_would_be_sent_and_changes_nothing(world):
    counted = await world.anthropic().messages.count_tokens(model="tiny", messages=ASK, tools=TOOLS)
    assert (world.engine.requests, world.sink.rows, world.capture.stats.calls) == ([], [], 0)
    message = await ask(world, ASK)
    assert counted.input_tokens == len(world.sent()) == message.usage.input_tokens + 7
    longer = [*ASK, echo(message), *ASK]
    counted = await world.anthropic().messages.count_tokens(model="tiny", messages=longer, tools=TOOLS)
    await ask(world, longer)
    assert counted.input_tokens == len(world.sent())
    status, _ = await world.post(body(ASK), path="/v1/messages/count_tokens?beta=true")
    assert status == 200


@pytest.mark.parametrize("said", ["late", THOUGHT, ""])
async def test_keep_alive_is_an_open_thinking_block(worlds, renderers, said):
    world = await worlds(renderers["hybrid"], keep_alive=0.01)
    gate = asyncio.Event()
    world.engine.say(said and f"<think>\n{said}", gate=gate)
    seen = []
    async with world.anthropic().messages.stream(**body(ASK)) as events:
        async for event in events:
            seen.append(event)
            if not gate.is_set() and sum(e.type == "content_block_delta" for e in seen) == 2:
                # Two keep-alives came; none of them said anything or completed a block.
                assert {e.delta.thinking for e in seen if e.type == "content_block_delta"} == {""}
                assert "content_block_stop" not in [e.type for e in seen]
                gate.set()
        message = await events.get_final_message()
    assert message.content[0].type == "thinking"
    assert message.content[0].signature
    assert message.usage.input_tokens == len(world.sent()) - 7
    assert message.usage.output_tokens == len(world.sink.rows[0].output)
    assert [e.type for e in seen].count("message_start") == 1
    assert seen[-1].type == "message_stop"
    # The stream's blocks come back as a history that continues the turn.
    await ask(world, [*ASK, echo(message), answers(message, "a", "b") if said == THOUGHT else ASK[0]])
    assert world.sink.rows[1].keep == len(world.whole(0))


async def test_a_reply_without_words_has_one_empty_block(world):
    world.engine.say("")
    message = await stream(world, ASK)
    assert [(block.type, block.text) for block in message.content] == [("text", "")]
    assert message.stop_reason == "end_turn"


async def test_a_cut_reply_says_so(world):
    world.engine.say("one two three four five six")
    message = await ask(world, ASK, max_tokens=4)
    assert message.stop_reason == "max_tokens"


async def test_error_after_the_stream_began_comes_before_any_block_is_complete(worlds, renderer):
    world = await worlds(renderer, keep_alive=0.01, call_seconds=0.2)
    world.serve("cell-0", None)
    seen = []
    with pytest.raises(anthropic.APIStatusError, match="too long"):
        async with world.anthropic().messages.stream(**body(ASK)) as events:
            async for event in events:
                seen.append(event.type)
    assert "content_block_start" in seen
    assert "content_block_stop" not in seen


async def test_over_long_prompt_has_the_words_that_claude_code_compacts_on(worlds, renderer):
    world = await worlds(renderer, context=50)
    status, answer = await world.post(body(ASK), path="/v1/messages")
    length = answer["error"]["message"].split()[4]
    assert (status, answer) == (
        400,
        {
            "type": "error",
            "error": {"type": "invalid_request_error", "message": f"prompt is too long: {length} tokens > 50 maximum"},
        },
    )
    assert int(length) > 50
    assert (world.sink.rows, world.capture.stats.server_errors) == ([], 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image' blocks"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "robot"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]}, "tool_use_id"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash_20250124"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking"}]}]}, "redacted_thinking"),
    ],
)
async def test_what_cannot_be_represented_is_refused(world, change, words):
    status, answer = await world.post({**body(ASK), **change}, path="/v1/messages")
    assert (status, answer["type"], answer["error"]["type"]) == (400, "error", "invalid_request_error")
    assert words in answer["error"]["message"]
    assert (world.engine.requests, world.sink.rows) == ([], [])


async def test_errors_and_models_in_its_own_shape(world):
    with pytest.raises(anthropic.AuthenticationError):
        await world.anthropic(key="nobody").messages.create(**body(ASK))
    status, answer = await world.post(body(ASK), path="/v1/messages/batches")
    assert (status, answer["error"]["type"]) == (404, "not_found_error")
    assert [model.id async for model in world.anthropic().models.list()] == ["tiny"]


async def test_claude_codes_greeting_is_harmless(world):
    import aiohttp

    async with aiohttp.ClientSession() as session:
        async with session.head(world.url + "/api/hello", headers={"x-api-key": "a-key-of-one-execution"}) as answer:
            assert answer.status == 404
    assert world.capture.stats.server_errors == 0


async def test_wishes_are_recorded(world):
    wishes = {"temperature": 1, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    await world.post(body(ASK, **wishes), path="/v1/messages")
    assert json.loads(world.sink.rows[0].evidence)["asked"] == wishes
