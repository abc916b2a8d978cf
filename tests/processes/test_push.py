"""A push that an engine does not take: an answer of the ranks to their lead, not their end."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import msgspec

from gyre.ledger.layout import RunFolder
from gyre.processes.ranks import Ranks
from gyre.recipe.load import dump_toml
from gyre.recipe.schema import Cells, Group, Model, Recipe, Rollout, Tasks, Train
from tests.engines.place import make_model


def write_run(folder: Path, model: str) -> RunFolder:
    """A run of cells of two tensor-parallel ranks, as far as a rank looks at it."""
    run = RunFolder(folder).create()
    recipe = Recipe(
        name="push",
        model=Model(path=model, dtype="float32"),
        tasks=Tasks(path="tasks"),
        rollout=Rollout(engine="reference", context=256),
        group=Group(executions=2, groups_per_step=1),
        train=Train(steps=1, tensor_parallel=2, tokens_per_microstep=256),
        cells=Cells(count=1, gpus_per_node=0),
    )
    run.recipe.write_text(dump_toml(msgspec.to_builtins(recipe)))
    (run.keys / "engine").write_text(json.dumps({"api_key": "a", "admin_key": "b"}))
    return run


async def test_ranks_outlive_an_engine_that_is_gone(tmp_path: Path) -> None:
    """Both ranks leave the collective in which the tensors are gathered, and do what they are asked next."""
    model = make_model(tmp_path / "model", seed=0)
    run = write_run(tmp_path / "run", model)
    words = ["--run", str(run.path), "--cell", "cell-0", "--incarnation", "1", "--model", model]
    with socket.socket() as gone:
        gone.bind(("127.0.0.1", 0))  # nobody listens there, and nobody else can
        url = f"http://127.0.0.1:{gone.getsockname()[1]}"
        ranks = await Ranks.start("cell-0", range(2), words, tmp_path / "logs", run.alive_path, 600.0)
        try:
            await ranks.ready()
            opened = await ranks.ask("open_lineage", lineage=1, openings=[])
            order = {"manifest": opened["manifest"], "weight_version": opened["weight_version"]}
            for _ in range(2):
                gone_too = {"url": url, "key_file": "engine", "shares": False}
                answer = await ranks.ask("push", engines=[{"name": "gone", **gone_too}], **order)
                assert list(answer["engines_failed"]) == ["gone"]
                assert answer["engines_failed"]["gone"].startswith("ClientConnectorError")
            assert (await ranks.ask("pull", manifest=opened["manifest"]))["nbytes"] == 0
        finally:
            await ranks.end()
