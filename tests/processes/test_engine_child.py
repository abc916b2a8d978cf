"""An engine as its lead sees it: one that answers nothing any more is ended, one that cannot start says why."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gyre.errors import UserError
from gyre.ledger.layout import RunFolder
from gyre.processes.engine_child import EngineChild
from gyre.recipe.schema import Cells, Model, Recipe, Rollout, Tasks, Train
from tests.engines.place import make_model

pytestmark = pytest.mark.timeout(900)


def recipe(model: str, **rollout: object) -> Recipe:
    return Recipe(
        name="r",
        model=Model(path=model, dtype="float32"),
        tasks=Tasks(path="t"),
        rollout=Rollout(context=256, executions_per_cell=2, **rollout),  # type: ignore[arg-type]
        train=Train(steps=1),
        cells=Cells(gpus_per_node=0),
    )


@pytest.fixture
async def child(tmp_path: Path) -> AsyncIterator[EngineChild]:
    """A reference engine that is ended after two seconds of silence."""
    model = make_model(tmp_path / "model", seed=0)
    asked = recipe(model, engine="reference", liveness=2.0, start_timeout=600.0)
    made = EngineChild(RunFolder(tmp_path / "run").create(), asked, Path(model), "engine", tmp_path / "engine.log")
    try:
        yield made
    finally:
        await made.close()


async def test_an_engine_that_hangs_is_ended(child: EngineChild) -> None:
    await child.start()
    process = child.child
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    assert await process.wait() == -signal.SIGKILL
    assert not child.running
    await child.start()
    assert child.running
    assert await child.client.health()


async def test_sglang_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYRE_CACHE", str(tmp_path / "nothing"))
    child = EngineChild(
        RunFolder(tmp_path / "run").create(), recipe("/m", engine="sglang"), Path("/m"), "engine", tmp_path / "log"
    )
    with pytest.raises(UserError, match="gyre engine install sglang"):
        await child.start()
