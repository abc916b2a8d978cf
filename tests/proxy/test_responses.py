"""OpenAI Responses: the official client against the proxy; items, namespaces, streams, history, errors."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}}
TOOLS = [
    {"type": "function", "name": "shell", "description": "Run", "parameters": PARAMETERS, "strict": False},
    {"type": "web_search", "external_web_access": False},
    {"type": "namespace", "name": "mcp__files", "description": "Files", "tools": [
        {"type": "function", "name": "read", "description": "Read", "parameters": PARAMETERS}
    ]},
    {"type": "custom", "name": "apply_patch", "description": "Patch", "format": {"type": "grammar"}},
]  # fmt: skip
ASK = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List the files."}]}]
THOUGHT = (
    'hm\n</think>\n\nI look.\n<tool_call>\n{"name": "shell", "arguments": {"command": "ls"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "mcp__files.read", "arguments": {"command": "a"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "apply_patch", "arguments": {"input": "*** Begin"}}\n</tool_call>'
)


async def create(world, items, **more):
    return await world.client().responses.create(model="tiny", input=items, tools=TOOLS, store=False, **more)


async def stream(world, items, **more):
    kept = []
    async for event in await create(world, items, stream=True, **more):
        kept.append(event)
    assert [event.sequence_number for event in kept] == list(range(len(kept)))
    return kept[-1].response, kept


async def either(world, items, streamed, **more):
    return (await stream(world, items, **more))[0] if streamed else await create(world, items, **more)


def echo(response):
    return [item.model_dump(exclude_none=True) for item in response.output]


@pytest.mark.parametrize("streamed", [False, True])
async def test_items_come_and_go(worlds, renderers, streamed):
    world = await worlds(renderers["thinking"])
    world.engine.say(THOUGHT)
    response = await either(world, ASK, streamed, instructions="Be a coding agent.")
    reasoning, message, shell, read, patch = response.output
    assert [item.type for item in response.output] == [
        "reasoning", "message", "function_call", "function_call", "custom_tool_call",
    ]  # fmt: skip
    assert (reasoning.content[0].text, response.output_text) == ("hm", "I look.")
    assert (shell.name, json.loads(shell.arguments)) == ("shell", {"command": "ls"})
    assert (read.name, read.namespace) == ("read", "mcp__files")
    assert (patch.name, patch.input) == ("apply_patch", "*** Begin")
    assert message.id.endswith(reasoning.encrypted_content)
    assert (response.status, response.usage.input_tokens) == ("completed", len(world.sent()))
    assert response.usage.input_tokens_details.cached_tokens == 7
    assert response.usage.output_tokens == len(world.sink.rows[0].output)

    outputs = [
        {"type": "function_call_output", "call_id": read.call_id, "output": [{"type": "input_text", "text": "text"}]},
        {"type": "function_call_output", "call_id": shell.call_id, "output": "a"},
        {"type": "custom_tool_call_output", "call_id": patch.call_id, "output": "done"},
    ]
    await create(world, [*ASK, *echo(response), *outputs], instructions="Be a coding agent.")
    before, row = world.whole(0), world.sink.rows[1]
    assert (row.parent, row.keep, world.sent()) == (0, len(before), before + row.context)
    replies = [f"<tool_response>\n{text}\n</tool_response>" for text in ("a", "text", "done")]
    assert world.renderer.decode(row.context) == (
        "\n<|im_start|>user\n" + "\n".join(replies) + "<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )


async def test_reasoning_alone_names_its_turn(worlds, renderers):
    world = await worlds(renderers["thinking"])
    world.engine.say("hm\n</think>\n\nyes")
    response = await create(world, ASK)
    reasoning, message = echo(response)
    # Codex sends back neither the reasoning's text nor, for messages, an id.
    back = [{**reasoning, "content": None, "summary": []}, {k: v for k, v in message.items() if k != "id"}]
    await create(world, [*ASK, *back, *ASK])
    assert world.sent()[: len(world.whole(0))] == world.whole(0)


async def test_what_is_not_rendered(world):
    await create(world, "hi")
    text = world.renderer.decode(world.sent())
    assert "web_search" not in text
    for name in ("shell", "mcp__files.read", "apply_patch"):
        assert f'"name": "{name}"' in text


async def test_client_metadata_is_no_part_of_a_request(worlds, renderer):
    world = await worlds(renderer, siblings=1)
    replies = [await create(world, ASK, extra_body={"client_metadata": {"n": str(n)}}) for n in range(2)]
    assert replies[0].id == replies[1].id
    assert (len(world.engine.requests), world.capture.stats.replayed) == (1, 1)
    assert (await create(world, [*ASK, *ASK])).id != replies[0].id


async def test_keep_alive_then_the_reply_in_one_numbering(worlds, renderer):
    world = await worlds(renderer, keep_alive=0.01)
    gate = asyncio.Event()
    world.engine.say("late", gate=gate)
    kinds = []
    numbers = []
    async for event in await create(world, ASK, stream=True):
        kinds.append(event.type)
        numbers.append(event.sequence_number)
        if kinds.count("response.in_progress") == 3:
            gate.set()
    assert kinds[:4] == ["response.created", *["response.in_progress"] * 3]
    assert (kinds.count("response.created"), kinds[-1]) == (1, "response.completed")
    assert numbers == list(range(len(numbers)))
    assert event.response.output_text == "late"


async def test_failure_after_the_stream_began(worlds, renderer):
    world = await worlds(renderer, keep_alive=0.01, call_seconds=0.2)
    world.serve("cell-0", None)
    response, events = await stream(world, ASK)
    assert events[-1].type == "response.failed"
    assert "too long" in response.error.message
    assert world.sink.rows == []


async def test_cut_reply_is_incomplete(world):
    world.engine.say("one two three four five six")
    response, events = await stream(world, ASK, max_output_tokens=4)
    assert (events[-1].type, response.incomplete_details.reason) == ("response.incomplete", "max_output_tokens")


async def test_over_long_prompt(worlds, renderer):
    world = await worlds(renderer, context=50)
    with pytest.raises(openai.BadRequestError, match="maximum context length is 50 tokens") as caught:
        await create(world, ASK)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input": []}, "at least one item"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input_image"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "call_id"),
        ({"tools": [{"type": "computer"}]}, "computer"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {}}}}, "text.format"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
async def test_what_cannot_be_represented_is_refused(world, change, words):
    with pytest.raises(openai.BadRequestError, match=words):
        await world.client().responses.create(**{"model": "tiny", "input": ASK, **change})
    assert (world.engine.requests, world.sink.rows) == ([], [])
