"""A call goes on elsewhere when its engine dies or its cell leaves: one answer, exact tokens, versions by span."""

from __future__ import annotations

import asyncio

import pytest

from gyre.engines.errors import EngineUnavailable
from gyre.ledger.turns import Span
from gyre.proxy.generate import find_stop, parse_version
from gyre.proxy.routes import Route, Routes

V1, V2 = "1.1-0123456789abcdef", "1.2-fedcba9876543210"
BODY = {"messages": [{"role": "user", "content": "Count."}]}
TEXT = "one two three four five six seven"


def said(answer) -> str:
    return answer["choices"][0]["message"]["content"]


async def moved(world, **told) -> list[int]:
    """Sample TEXT in two parts, the cell of the first leaving in between; the ids of TEXT."""
    ids = world.renderer.encode(TEXT)
    gate = asyncio.Event()
    world.engine.say(TEXT, gate=gate, **told)
    world.engine.say(world.renderer.decode(ids[5:]))
    task = asyncio.ensure_future(world.post({**BODY, "stream": False}))
    await world.engine.started.wait()
    # The new route first, then the old cell stops.
    world.serve("cell-1", V2)
    world.routes.set("g00001-00", "cell-1")
    world.serve("cell-0", None)
    gate.set()
    status, answer = await task
    assert (status, said(answer)) == (200, TEXT)
    return ids


@pytest.mark.parametrize("how", [{"cut": 5}, {"crash": 5}])
async def test_a_call_continues_in_another_cell(world, how):
    ids = await moved(world, **how)
    first, second = world.engine.requests
    assert second.input_ids == first.input_ids + ids[:5]
    assert second.max_new_tokens == first.max_new_tokens - 5
    assert [route.cell for route in world.engine.routes] == ["cell-0", "cell-1"]
    (row,) = world.sink.rows
    assert row.output == [*ids, world.renderer.end_id]
    assert row.spans == [Span(1, 1, 5), Span(1, 2, len(row.output) - 5)]
    assert row.logprobs[:6] == [-0.5, -0.5 - 1 / 64, -0.5 - 2 / 64, -0.5 - 3 / 64, -0.5 - 4 / 64, -0.5]
    assert (row.cell, world.capture.stats.continuations) == ("cell-1", 1)


async def test_a_cell_left_in_mid_stream(world):
    ids = world.renderer.encode(TEXT)
    world.engine.say(TEXT, cut=4)
    world.engine.say(world.renderer.decode(ids[4:]))
    pieces = []
    async for chunk in await world.client().chat.completions.create(model="tiny", stream=True, **BODY):
        pieces.append(chunk.choices[0].delta.content or "")
    assert "".join(pieces) == TEXT
    assert len(world.sink.rows) == 1


async def test_an_engine_that_dies_before_the_first_token(world):
    world.engine.say(TEXT, crash=0)
    world.engine.say(TEXT)
    assert said((await world.post(BODY))[1]) == TEXT
    assert world.engine.requests[0].input_ids == world.engine.requests[1].input_ids


async def test_a_cut_call_that_already_holds_its_end_is_not_continued(world):
    ids = world.renderer.encode(TEXT)
    world.engine.say(TEXT, cut=len(ids) + 1)
    _, answer = await world.post(BODY)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert len(world.engine.requests) == 1


async def test_a_cut_call_at_its_budget_is_not_continued(world):
    world.engine.say(TEXT, cut=4)
    _, answer = await world.post({**BODY, "max_tokens": 4})
    assert answer["choices"][0]["finish_reason"] == "length"
    assert len(world.engine.requests) == 1


async def test_tokens_of_other_weights_than_the_salt_are_discarded(world):
    world.engine.say("stale words", version=V2)
    world.engine.say("fresh")
    assert said((await world.post(BODY))[1]) == "fresh"
    (row,) = world.sink.rows
    assert row.spans == [Span(1, 1, len(row.output))]
    assert world.engine.requests[1].input_ids == world.engine.requests[0].input_ids
    assert world.capture.stats.tokens_discarded == len(world.renderer.encode("stale words")) + 1


async def test_a_call_waits_for_a_route(world):
    world.serve("cell-0", None)
    task = asyncio.ensure_future(world.post(BODY))
    while world.capture.stats.calls == 0:
        await asyncio.sleep(0.005)
    assert world.engine.requests == []
    world.serve("cell-0", V1)
    assert (await task)[0] == 200


async def test_engines_that_stay_dead_end_as_a_server_error(world):
    for _ in range(10):
        world.engine.say("", error=EngineUnavailable("connection refused"))
    status, answer = await world.post(BODY)
    assert (status, answer["error"]["code"]) == (503, "generation_failed")
    assert "connection refused" in answer["error"]["message"]
    assert len(world.engine.requests) == 4
    assert "engine-key" not in answer["error"]["message"]
    assert world.capture.stats.server_errors == 1


async def test_stop_string_across_a_continuation(world):
    ids = world.renderer.encode("alpha BREAK beta")
    middle = len(world.renderer.encode("alpha BRE"))
    world.engine.say("alpha BREAK beta", cut=middle, chunk=2)
    world.engine.say(world.renderer.decode(ids[middle:]), chunk=2)
    _, answer = await world.post({**BODY, "stop": "BREAK"})
    assert said(answer) == "alpha "
    assert world.renderer.decode(world.sink.rows[0].output).endswith("BREAK")


def test_versions_and_stops():
    assert parse_version(V2) == (1, 2)
    assert find_stop("a END b STOP", ["STOP", "END"]) == 2
    assert find_stop("a", ["b"]) is None


async def test_routes_wake_whoever_waits():
    routes = Routes()
    route = Route(url="u", key="secret", weight_version=V1, cell="c")
    waiting = asyncio.ensure_future(routes.current("e"))
    await asyncio.sleep(0)
    routes.set("e", "c")
    await asyncio.sleep(0)
    assert not waiting.done()
    routes.set_serving("c", route)
    assert await waiting == route
    other = asyncio.ensure_future(routes.other("e", route, 5.0))
    await asyncio.sleep(0)
    routes.set("e", "")
    await other
    assert routes.peek("e") is None
    assert "secret" not in repr(route)
