"""Experts that tokens went to: recorded before the turn's row, each position's own, or not at all."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from gyre.proxy.generate import Generator, Wanted, nothing_sampled
from gyre.proxy.routes import Route, Routes
from tests.proxy.conftest import MIXTURE, V1, V2, FakeEngine, World, experts_of

BODY = {"messages": [{"role": "user", "content": "Count."}]}
TEXT = "one two three four five six seven"


@pytest.fixture
async def world(worlds: Callable[..., Any], renderer) -> World:
    return await worlds(renderer, mixture=MIXTURE)


def recorded(world: World, number: int = -1) -> np.ndarray:
    """The rows of a record, which are those of its turn's positions; it came before the turn."""
    before, record = world.routing.records[number]
    turn = world.sink.rows[before]
    assert (record.execution, record.attempt, record.turn) == (turn.execution, turn.attempt, turn.turn)
    assert (record.start, record.item_size) == (max(turn.keep - 1, 0), 2)
    rows = experts_of(world.whole(turn.turn), record.start)
    assert np.array_equal(record.table(), rows[: record.rows])
    return rows


async def test_a_turn_and_the_one_after_it(world):
    world.engine.say(TEXT)
    said = (await world.post(BODY))[1]["choices"][0]["message"]
    after = [*BODY["messages"], said, {"role": "user", "content": "More."}]
    world.engine.say("eight")
    await world.post({"messages": after})
    first, second = (record for _, record in world.routing.records)
    rows = world.sink.rows[0]
    whole = len(rows.context) + len(rows.output)
    assert (first.start, second.start) == (0, whole - 1), "the last sampled token's row comes with the next turn"
    assert [first.rows, second.rows] == [len(recorded(world, 0)), len(recorded(world, 1))]


@pytest.mark.parametrize("how", [{"cut": 5}, {"crash": 5}, {"cut": 0}, {"version": V2}])
async def test_a_call_that_goes_on_has_each_position_once(world, how):
    ids = world.renderer.encode(TEXT)
    kept = ids[:5] if 5 in how.values() else []
    world.engine.say(TEXT, **how)
    world.engine.say(world.renderer.decode(ids[len(kept) :]))
    await world.post(BODY)
    first, second = world.engine.requests
    known = len(first.input_ids) + 4 if "cut" in how and kept else 0
    assert (first.routed_experts_start, second.routed_experts_start) == (0, known)
    assert world.routing.records[0][1].rows == len(recorded(world))


async def test_a_stop_string_leaves_its_calls_tokens_without(world):
    ids = world.renderer.encode("alpha BREAK beta gamma delta")
    middle = len(world.renderer.encode("alpha BRE"))
    world.engine.say("alpha BREAK beta gamma delta", cut=middle, chunk=2)
    world.engine.say(world.renderer.decode(ids[middle:]), chunk=2)
    await world.post({**BODY, "stop": "BREAK"})
    prompt = len(world.engine.requests[0].input_ids)
    assert world.routing.records[0][1].rows == prompt + middle - 1 < len(recorded(world))


async def test_rows_behind_a_stop_string_are_cut(world):
    world.engine.say("alpha BREAK beta", chunk=100)
    await world.post({**BODY, "stop": "BREAK"})
    assert world.routing.records[0][1].rows == len(recorded(world))
    assert world.sink.rows[0].output[-1] != world.renderer.end_id


@pytest.mark.parametrize(
    "spoil",
    [lambda rows: rows[:-1], lambda rows: rows + MIXTURE.experts, lambda rows: rows - 400, lambda rows: rows[:0]],
)
async def test_what_is_not_each_positions_experts_is_not_recorded(world, spoil):
    world.engine.say(TEXT, spoil=spoil)
    assert (await world.post(BODY))[0] == 200
    assert world.routing.records == [] and len(world.sink.rows) == 1


async def test_a_full_disk_fails_the_call(world):
    world.sink.full = True
    world.engine.say(TEXT)
    assert (await world.post(BODY))[0] == 503
    assert world.sink.rows == world.routing.records == []


async def test_a_dense_model_is_not_asked(worlds, renderer):
    world = await worlds(renderer)
    await world.post(BODY)
    assert not world.engine.requests[0].return_routed_experts
    assert world.routing.records == []


STEPS = st.fixed_dictionaries(
    {}, optional={"version": st.just(V2), "chunk": st.integers(1, 5), "spoil": st.just(lambda rows: rows[1:])}
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cuts=st.lists(st.tuples(st.sampled_from(["cut", "crash"]), st.integers(0, 4), STEPS), max_size=5),
    stops=st.sampled_from([(), ("four",), ("e",), ("nothing of it",)]),
    budget=st.integers(1, 30),
    start=st.integers(0, 4),
)
def test_rows_are_each_positions_for_any_cutting(renderer, cuts, stops, budget, start):
    """The call goes on after each cut with what is left of the text, as a model would."""
    engine, routes = FakeEngine(renderer), Routes()
    routes.set_serving("cell-0", Route(url="http://cell-0", key="k", weight_version=V1, cell="cell-0"))
    routes.set("e", "cell-0")
    ids, done = renderer.encode(TEXT), 0
    for kind, count, told in cuts:
        engine.say(renderer.decode(ids[done:]), **{kind: min(count, len(ids) - done)}, **told)
        done += 0 if "version" in told else min(count, len(ids) - done)
    engine.say(renderer.decode(ids[done:]))
    clock = itertools.count(1)
    generator = Generator(
        routes, engine.at, temperature=1.0, stop_ids=renderer.stop_ids, decode=renderer.decode,
        token_hex=lambda nbytes: f"{next(clock):0{2 * nbytes}x}", now=lambda: 0.0, patience=0.0, mixture=MIXTURE,
    )  # fmt: skip
    prompt = renderer.encode("the prompt of it")
    start = min(start, len(prompt) - 1)
    into = nothing_sampled()
    wanted = Wanted(
        execution="e", prompt=type(into.output)("i", prompt), max_tokens=budget, stops=stops, routing_from=start
    )
    asyncio.run(generator.sample(wanted, into))
    rows = experts_of([*prompt, *into.output], start)
    found = np.frombuffer(bytes(into.routing), dtype="<u2").reshape(-1, MIXTURE.layers, MIXTURE.chosen)
    assert np.array_equal(found, rows[: len(found)])
    if (
        not stops
        and "spoil" not in {name for _, _, told in cuts for name in told}
        and "crash" not in dict((kind, 0) for kind, _, _ in cuts)
    ):
        assert len(found) == len(rows)
