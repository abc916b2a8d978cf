"""An engine that takes its weights from a running one, and when those count.

Engines are the reference's, in processes of their own: each loads its folder when it starts, which is what taking over
a seed's weights comes to if it has the same.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from gyre.engines.client import EngineClient
from gyre.engines.push import push_weights
from gyre.engines.sglang.arguments import NO_SEED, Seed
from gyre.ledger import events as ev
from gyre.ledger.layout import RunFolder
from gyre.ledger.state import CellIncarnation, RunState
from gyre.processes.children import ChildDied
from gyre.processes.engine_child import EngineChild
from gyre.processes.seeds import seed_of
from gyre.recipe.schema import Model, Recipe, Rollout, Tasks, Train
from tests.engines.place import Oracle, make_model

VERSION = "1.3-abcd"
Then = Callable[[EngineClient], Awaitable[object]]


class Late(EngineChild):
    """Is launched anew by being as it was: with its folder's weights, without a version. `then` is done to its seed at
    the moment when it has read it."""

    then: tuple[EngineClient, Then] | None = None
    readable = True
    from_seed = 0

    async def _launch(self, seed: Seed) -> None:
        if seed.url and not self.readable:
            raise ChildDied("it ended before it answered")
        if not self.running:
            await super()._launch(seed)
        await self.client.set_version("default")
        self.loaded = ""
        self.from_seed += bool(seed.url)
        if seed.url and self.then is not None:
            client, work = self.then
            await work(client)


def child(folder: Path, model: str, name: str) -> Late:
    recipe = Recipe(
        name="seeds",
        model=Model(path=model, dtype="float32"),
        tasks=Tasks(path="tasks"),
        rollout=Rollout(engine="reference", context=256),
        train=Train(steps=1),
    )
    run = RunFolder(folder)
    run.keys.mkdir(parents=True, exist_ok=True)
    return Late(run, recipe, Path(model), name, folder / f"{name}.log")


async def test_what_a_seed_had_before_and_after_counts(tmp_path: Path) -> None:
    """The versions, and the checksums: a seed that was named otherwise meanwhile, or pushed something else, be it under
    the same name, leaves no version behind; one that cannot be read leaves an engine that has started as ever."""
    model = make_model(tmp_path / "model", seed=0)
    own, other = Oracle(model), Oracle(make_model(tmp_path / "other", seed=1))
    giver, late = child(tmp_path / "run", model, "giver"), child(tmp_path / "run", model, "late")

    async def renamed(client: EngineClient) -> None:
        await client.set_version("1.4-bbbb")

    async def pushed(client: EngineClient) -> None:
        await push_weights(client, other.named(), "1.4-bbbb", 1 << 20)

    async def mixed(client: EngineClient) -> None:
        await push_weights(client, other.named(), VERSION, 1 << 20)

    try:
        await giver.start()
        await giver.client.set_version(VERSION)
        seed = Seed(giver.url, giver.run.keys / giver.key_file, VERSION)
        late.seed = seed
        await late.start()
        assert late.loaded == await late.client.weight_version() == VERSION
        await late.release()
        assert late.loaded == "", "what was released is to be pushed again"
        await late.resume()
        await push_weights(late.client, own.named(), "default", 1 << 20)

        for then in (renamed, pushed, mixed):
            await push_weights(giver.client, own.named(), VERSION, 1 << 20)
            late.then, late.from_seed = (giver.client, then), 0
            await late.start()
            assert (late.running, late.from_seed, late.loaded) == (True, 1, "")
            assert await late.client.weight_version() == "default"

        async def not_taken(found: Seed) -> None:
            late.seed, late.from_seed = found, 0
            await late.start()
            assert (late.running, late.from_seed, late.loaded) == (True, 0, "")

        await not_taken(Seed(seed.url, seed.keys, "1.5-another"))
        await not_taken(Seed("http://127.0.0.1:1", seed.keys, VERSION))
        await not_taken(Seed(seed.url, seed.keys.with_name("gone"), VERSION))
        late.readable = False
        await not_taken(seed)
    finally:
        await giver.close()
        await late.close()


def serving(name: str, version: int, key: str = "key") -> CellIncarnation:
    said = ev.Serving(lineage=1, version=version, weight_version=f"1.{version}-{name}")
    return CellIncarnation(
        engines={0: ev.EngineStarted(engine=0, url=f"http://{name}:1", key_file=key, pid=1)}, serving=said
    )


def test_the_seed_is_another_cells_engine_that_serves_the_version(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    state = RunState()
    assert seed_of(state, run, "cell-0") == NO_SEED
    state.cells = {"cell-0": {1: serving("a", 3)}, "cell-1": {1: serving("b", 2)}, "cell-2": {1: serving("c", 1)}}
    for name in state.cells:
        state.accepted[name] = 1
    assert seed_of(state, run, "cell-0") == Seed("http://b:1", run.keys / "key", "1.2-b")
    assert seed_of(state, run, "cell-0", "1.1-c").url == "http://c:1"
    assert seed_of(state, run, "cell-0", "1.3-a") == NO_SEED
    assert seed_of(state, run, "cell-0", "1.2-b", engine=1) == NO_SEED, "it has no engine of that number"
    of_two = state.cells["cell-1"][1].engines
    of_two[1] = ev.EngineStarted(engine=1, url="http://b:2", key_file="other", pid=2)
    assert seed_of(state, run, "cell-0", engine=1) == Seed("http://b:2", run.keys / "other", "1.2-b")
    state.cells["cell-1"][1].serving = None
    assert seed_of(state, run, "cell-0").url == "http://c:1"
