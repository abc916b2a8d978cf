"""Runs whose cells have several ranks: tensor-parallel, a pipeline, and data-parallel with the loss of a rank."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gyre.ledger.checkpoints import CheckpointMeta, CheckpointReader
from gyre.ledger.job import read_job
from gyre.ledger.microstep_files import read_microstep
from gyre.recipe.load import load_recipe
from tests.chaos import moments
from tests.chaos.harness import SMALL_MICROSTEPS, Drill
from tests.chaos.moments import SATELLITE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PREFIX = "optimizer.exp_avg."


@pytest.fixture
def drill(tmp_path: Path, cache: Path, request: pytest.FixtureRequest) -> Iterator[Drill]:
    made = Drill(tmp_path / "runs", cache, settings=(*SMALL_MICROSTEPS, request.param))
    made.home.mkdir()
    yield made
    made.stop()


@pytest.mark.parametrize("drill", ["train.tensor_parallel=2", "train.pipeline_parallel=3"], indirect=True)
def test_tensor_parallel_cells_and_pipelines(drill: Drill, tmp_path: Path) -> None:
    drill.submit()
    drill.until(moments.live)
    drill.until_both_train()
    drill.assert_completed()
    assert moments.merged(drill.state)  # the satellite's ranks were pulled by the core's
    drill.assert_replays(2)
    assert gradient_difference(drill, tmp_path) <= 1e-5


@pytest.mark.parametrize("drill", ["train.data_parallel=2"], indirect=True)
def test_data_parallel_cells_and_the_loss_of_one_rank_in_mid_step(drill: Drill, tmp_path: Path) -> None:
    drill.submit()
    drill.until(moments.live)
    drill.until_both_train()
    lost = drill.until(moments.unmerged)
    drill.kill(drill.rank(SATELLITE, 1))
    drill.assert_completed()
    assert drill.state.incarnation(SATELLITE) == 2  # one rank's end is the cell's
    assert len(drill.state.lineages) == 1
    assert_replays_in_another_layout(drill)
    merged = moments.merged(drill.state)
    for name in lost:  # granted again, unless it had been merged before the kill
        assert name in merged or len(moments.grants(drill.state, name)) == 2
    drill.assert_replays(2)
    assert gradient_difference(drill, tmp_path) <= 1e-5


def assert_replays_in_another_layout(drill: Drill) -> None:
    """Each step, started from its checkpoint, has the gradient of the run: norm-wise to 1e-5."""
    other = ("train.data_parallel=1", "train.tensor_parallel=2", "train.sequence_parallel=true")
    done = drill.command("replay", "drill", "--json", *(word for setting in other for word in ("--set", setting)))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(done.stdout)
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["microsteps_equal"] and row["weights_equal"] is None
        assert 0 < row["gradient_difference"] <= 1e-5, rows  # not bit-equal: it was another sum
        assert row["gradient_norm"] == pytest.approx(row["gradient_norm_by_run"], rel=1e-5)


def gradient_difference(drill: Drill, tmp_path: Path) -> float:
    """|g - g1| / |g1| of the first step: g the run's, g1 that of one rank with the same micro-steps in one buffer.

    Adam's first moment after one step is (1 - beta1) times the clipped gradient, and is in the checkpoint.
    """
    from gyre.training.layout import Layout
    from gyre.training.settings import TrainSettings, learning_rate
    from gyre.training.trainer import MicroStepBatch, Trainer

    recipe, step = load_recipe(drill.run.recipe, folders=False), drill.state.steps[1]
    assert step.packed is not None
    one = Trainer(Path(read_job(drill.run).model), TrainSettings.of(recipe), Layout(), core=True)
    try:
        one.load_hf()
        for name in step.packed.microsteps:
            microstep, _ = read_microstep(drill.run.microsteps / f"{name}.arrow")
            one.train_microstep(MicroStepBatch.of(microstep))
        assert one.commit(step.packed.executions, learning_rate(0, recipe.train)).grad_norm > 0
        path = one.save_checkpoint(tmp_path / "one", CheckpointMeta(1, 1, 1), "n").path
    finally:
        one.close()
    ours, theirs = CheckpointReader(path), CheckpointReader(drill.run.checkpoint_path(1))
    keys, other = ([key for key in list(reader.keys()) if key.startswith(PREFIX)] for reader in (ours, theirs))
    assert keys == other
    own = np.concatenate([ours.read(key).ravel() for key in keys]).astype(np.float64)
    # the vocabulary is padded to a multiple of the tensor-parallel ranks; the padding has no gradient
    run = np.concatenate([theirs.read(key)[: len(ours.read(key))].ravel() for key in keys]).astype(np.float64)
    assert np.linalg.norm(own) > 0
    return float(np.linalg.norm(own - run) / np.linalg.norm(own))
