"""Which of a cell's engines an execution's calls go to: one, as long as it stays there, and all get their share."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, strategies as st

from gyre.engines.errors import EngineUnavailable
from gyre.proxy.routes import Route, Routes, choose

VERSION = "1.1-0123456789abcdef"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hello."}]}


def gang(cell: str, engines: int, version: str = VERSION) -> list[Route]:
    return [
        Route(url=f"http://{cell}:{number}", key="k", weight_version=version, cell=cell, engine=number)
        for number in range(engines)
    ]


@given(st.text(min_size=1, max_size=12), st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_the_choice_is_one_with_the_fewest(execution: str, loads: list[int]) -> None:
    chosen = choose(execution, loads)
    assert loads[chosen] == min(loads)
    assert choose(execution, loads) == chosen


def test_workers_do_not_all_begin_with_the_same_engine() -> None:
    first = Counter(choose(f"g{group:05d}-{number:02d}", [0] * 4) for group in range(25) for number in range(16))
    assert set(first) == set(range(4))
    assert max(first.values()) < 2 * min(first.values())


@given(
    st.integers(1, 8),
    st.lists(st.tuples(st.sampled_from(["route", "ask", "end", "leave", "serve"]), st.integers(0, 11)), max_size=60),
)
def test_an_execution_stays_at_its_engine_while_it_stays_in_its_cell(engines: int, moves: list) -> None:
    """Whatever others do, and through the cell's leaving and coming back; those that ask are spread evenly."""
    routes, cells, stays = Routes(), {}, {}
    routes.set_serving("a", *gang("a", engines))
    routes.set_serving("b", *gang("b", engines))
    for what, number in moves:
        name, cell = f"e{number}", "ab"[number % 2]
        match what:
            case "route":
                cell = "ab"[len(stays) % 2]
                routes.set(name, cell)
                if cells.get(name) != cell:
                    stays.pop(name, None)
                cells[name] = cell
            case "ask":
                route = routes.peek(name)
                if route is not None:
                    assert route.cell == cells[name]
                    assert stays.setdefault(name, route.engine) == route.engine
            case "end":
                routes.forget(name)
                cells.pop(name, None)
                stays.pop(name, None)
            case "leave":
                routes.set_serving(cell)
                assert all(routes.peek(other) is None for other in cells if cells[other] == cell)
            case "serve":
                routes.set_serving(cell, *gang(cell, engines, f"1.{number}-0123456789abcdef"))


def test_executions_of_a_cell_are_spread_evenly() -> None:
    routes = Routes()
    routes.set_serving("a", *gang("a", 3))
    for number in range(11):
        routes.set(f"e{number}", "a")
    shares = Counter(route.engine for number in range(11) if (route := routes.peek(f"e{number}")))
    assert sorted(shares.values()) == [3, 4, 4]
    routes.forget("e0")
    routes.set("new", "a")
    assert routes.peek("new") is not None
    assert sorted(Counter(routes.peek(f"e{n}").engine for n in range(1, 11)).values())[0] >= 2  # type: ignore[union-attr]


async def test_calls_go_to_one_engine_and_go_on_there_when_it_is_well_again(world) -> None:
    world.routes.set_serving("cell-0", *gang("cell-0", 2))
    for said in ("one", "two"):
        world.engine.say(said)
        assert (await world.post(BODY))[0] == 200
    world.engine.say("", error=EngineUnavailable("connection lost"))
    world.engine.say("three")
    assert (await world.post(BODY))[0] == 200
    assert len(world.engine.routes) == 4
    assert len({route.engine for route in world.engine.routes}) == 1
