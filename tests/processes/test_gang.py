"""A cell's engines: started, given weights, drained and released together; one that ends comes back among the others.

Engines are the reference's, in processes of their own; the trainer's ranks are stood in for by one push to all.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gyre.engines.client import EngineClient
from gyre.engines.errors import EngineError
from gyre.engines.push import UPDATING, PushFailed, Tensors, push_to_all
from gyre.engines.types import GenerateRequest, Generation, new_rid
from gyre.ledger import events as ev
from gyre.ledger.job import Job
from gyre.ledger.layout import RunFolder
from gyre.ledger.state import RunState
from gyre.processes.children import Child
from gyre.processes.gang import Gang
from gyre.processes.parts import Nodes, Part
from gyre.recipe.schema import Cells, Model, Recipe, Rollout, Tasks, Train
from tests.engines.place import Oracle, make_model

ENGINES = 2
BUCKET = 40_000


class Lead:
    """As much of a cell's lead as its engines need; and its ranks, which have the weights of `model`."""

    name = "cell-0"

    def __init__(self, folder: Path, model: str) -> None:
        self.run = RunFolder(folder).create()
        self.recipe = Recipe(
            name="gang",
            model=Model(path=model, dtype="float32"),
            tasks=Tasks(path="tasks"),
            rollout=Rollout(engine="reference", context=256, engines_per_cell=ENGINES),
            train=Train(steps=1),
            cells=Cells(count=1, gpus_per_node=0),
        )
        about: dict[str, Any] = {"tasks": [], "eval_tasks": [], "workers": [], "code": "0", "created": 0.0}
        self.job = Job(launcher="local", model=model, cells=[self.name], **about)
        self.state = RunState()
        self.oracle = Oracle(model)
        self.said: list[ev.EngineStarted] = []
        self.pushed: list[list[str]] = []

    def say(self, event: ev.EngineStarted) -> None:
        self.said.append(event)

    async def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        engines, version = arguments["engines"], arguments["weight_version"]
        assert op == "push"
        self.pushed.append([engine["name"] for engine in engines])
        async with aiohttp.ClientSession() as session:
            pushes = []
            for engine in engines:
                keys = json.loads((self.run.keys / engine["key_file"]).read_text())
                client = EngineClient(engine["url"], session, keys["api_key"], keys["admin_key"])
                pushes.append((client, Tensors(1)))
            try:
                sums = await push_to_all(pushes, self.oracle.named(), version, BUCKET)
            except PushFailed as failed:
                return {"engines_failed": {engines[at]["name"]: str(why) for at, why in failed.failures.items()}}
        assert len(set(sums)) == 1
        return {"checksums": sums}


def order(version: int) -> ev.ServeOrdered:
    weights = f"1.{version}-{version:016x}"
    about: dict[str, Any] = {"cell": "cell-0", "incarnation": 1, "lineage": 1, "step": version, "version": version}
    return ev.ServeOrdered(**about, weight_version=weights, manifest=weights)


async def versions(gang: Gang) -> list[str]:
    return [await engine.version() for engine in gang.engines]


async def logprobs(gang: Gang, number: int) -> list[float]:
    ids = GenerateRequest(input_ids=[5, 6, 7, 8], rid=new_rid(secrets.token_hex), max_new_tokens=4, temperature=0.01)
    async for chunk in gang.engines[number].client.generate(ids):
        last = chunk
    assert isinstance(last, Generation) and last.finish == "length"
    return last.logprobs


async def test_engines_serve_together_and_one_that_ends_comes_back_among_the_others(tmp_path: Path) -> None:
    lead = Lead(tmp_path / "run", make_model(tmp_path / "model", seed=0))
    other = Oracle(make_model(tmp_path / "other", seed=1))
    gang = Gang(lead, Nodes(lead))  # type: ignore[arg-type]
    ended: asyncio.Queue[Child | Part] = asyncio.Queue()
    watch = asyncio.create_task(gang.watch(ended.put_nowait))
    try:
        await gang.start()
        assert sorted(said.engine for said in lead.said) == [0, 1]
        assert len({(said.url, said.key_file, said.pid) for said in lead.said}) == ENGINES
        assert [engine.name for engine in gang.engines] == ["cell-0-engine-0", "cell-0-engine-1"]
        assert all(said.key_file.startswith(f"cell-0-engine-{said.engine}.") for said in lead.said)
        assert all(engine.log_file.exists() for engine in gang.engines)

        await gang.push(lead.ask, order(1))
        assert lead.pushed == [["cell-0-engine-0", "cell-0-engine-1"]]
        assert await versions(gang) == [order(1).weight_version] * 2
        first = await logprobs(gang, 0)
        assert await logprobs(gang, 1) == pytest.approx(first)

        await gang.drain()
        await gang.release()
        assert not gang.holds_memory
        lead.oracle = other
        await gang.push(lead.ask, order(2))  # released ones take their memory again
        assert gang.holds_memory
        assert await versions(gang) == [order(2).weight_version] * 2
        second = await logprobs(gang, 0)
        assert await logprobs(gang, 1) == pytest.approx(second)
        assert second != pytest.approx(first)

        stays, goes = (engine.child for engine in gang.engines)
        assert isinstance(stays, Child) and isinstance(goes, Child)
        os.kill(goes.pid, signal.SIGKILL)
        assert await ended.get() is goes
        assert gang.has(goes)
        await gang.drain()
        assert not gang.has(goes), "what is left of it is cleared away"
        await gang.release()
        await gang.push(lead.ask, order(2))
        assert gang.engines[0].child is stays
        assert [said.engine for said in lead.said[ENGINES:]] == [1]
        assert await versions(gang) == [order(2).weight_version] * 2
        assert await logprobs(gang, 1) == pytest.approx(second)

        await ends_in_the_middle_of_a_push(lead, gang)
    finally:
        watch.cancel()
        await gang.close()
    assert not any(engine.running for engine in gang.engines)


async def ends_in_the_middle_of_a_push(lead: Lead, gang: Gang) -> None:
    """The one that ended is named and ended, the other one serves nothing until the next push, which heals both."""
    victim, named = gang.engines[0].child, lead.oracle.named
    assert isinstance(victim, Child)

    def torn() -> Any:
        for number, tensor in enumerate(named()):
            if number == 4:
                os.kill(victim.pid, signal.SIGKILL)
            yield tensor

    lead.oracle.named = torn  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="not with cell-0-engine-0"):
        await gang.push(lead.ask, order(3))
    assert (gang.engines[0].running, await gang.engines[1].version()) == (False, UPDATING)
    lead.oracle.named = named  # type: ignore[method-assign]
    await gang.push(lead.ask, order(3))
    assert await versions(gang) == [order(3).weight_version] * 2
