"""Checkpoints of a trainer: what was saved goes on as if nothing had happened."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gyre.errors import UserError
from gyre.ledger import checkpoints
from gyre.ledger.checkpoints import CheckpointMeta, CheckpointReader, newest_complete, verify
from gyre.ledger.microsteps import MicroStep
from gyre.training.batch import MicroStepBatch
from gyre.training.export import export_checkpoint

LENGTHS = [37, 20, 51]
META = CheckpointMeta(lineage=2, step=12, version=5, merged=("a-1", "b-2"))


def _steps(trainer: Any, helpers: Any, count: int, seed: int) -> None:
    for step in range(count):
        trainer.train_microstep(helpers.make_batch(LENGTHS, seed=seed + step))
        trainer.commit(2, 1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("before", [0, 2])
def test_resuming_is_bit_equal_to_never_stopping(
    make_trainer: Any, helpers: Any, tmp_path: Path, dtype: str, before: int
) -> None:
    trainer = make_trainer(dtype=dtype, clip=(0.5, 0.5))
    _steps(trainer, helpers, before, seed=1)
    info = trainer.save_checkpoint(tmp_path / "checkpoints", META, "n1")
    saved = trainer.weights_digest()
    _steps(trainer, helpers, 2, seed=7)
    expected = trainer.weights_digest()

    resumed = make_trainer(dtype=dtype, clip=(0.5, 0.5))
    loaded = resumed.load_checkpoint(info.path)
    assert (loaded.meta.lineage, loaded.meta.step, loaded.meta.version) == (2, 12, 5)
    assert loaded.meta.merged == ("a-1", "b-2") and loaded.meta.extra["optimizer_steps"] == before
    assert resumed.weights_digest() == saved
    _steps(resumed, helpers, 2, seed=7)
    assert resumed.weights_digest() == expected != saved


def test_saving_changes_nothing_for_the_writer(make_trainer: Any, helpers: Any, tmp_path: Path) -> None:
    trainer = make_trainer()
    _steps(trainer, helpers, 3, seed=1)
    expected = trainer.weights_digest()
    again = make_trainer()
    for step in range(3):
        again.save_checkpoint(tmp_path, CheckpointMeta(1, step, step), "n")
        _steps(again, helpers, 1, seed=1 + step)
    assert again.weights_digest() == expected


def test_a_promoted_satellite_goes_on_like_the_core(make_trainer: Any, helpers: Any, tmp_path: Path) -> None:
    core = make_trainer()
    _steps(core, helpers, 2, seed=1)
    path = core.save_checkpoint(tmp_path, META, "n").path
    _steps(core, helpers, 1, seed=9)
    expected = core.weights_digest()
    satellite = make_trainer(core=False)
    satellite.train_microstep(helpers.make_batch(LENGTHS))
    satellite.promote()
    satellite.load_checkpoint(path)
    _steps(satellite, helpers, 1, seed=9)
    assert satellite.weights_digest() == expected


def test_a_satellite_loads_weights_alone(make_trainer: Any, helpers: Any, tmp_path: Path) -> None:
    core = make_trainer()
    _steps(core, helpers, 1, seed=1)
    path, digest = core.save_checkpoint(tmp_path, META, "n").path, core.weights_digest()
    satellite = make_trainer(core=False)
    satellite.load_checkpoint(path)
    assert satellite.weights_digest() == digest and not satellite.core


def test_the_folder_is_plain_zarr_with_stacked_layers(make_trainer: Any, helpers: Any, tmp_path: Path) -> None:
    trainer = make_trainer(dtype="bfloat16")
    _steps(trainer, helpers, 1, seed=1)
    info = trainer.save_checkpoint(tmp_path, META, "n")
    assert verify(info.path) == []
    found, passed = newest_complete(tmp_path)
    assert found is not None and found.path == info.path and passed == []
    reader = CheckpointReader(info.path)
    key = "decoder.layers.self_attention.linear_qkv.weight"
    assert reader.shape(key) == (2, 128, 64) and reader.dtype(key) == "bfloat16"
    assert reader.dtype(f"optimizer.main.{key}") == reader.dtype(f"optimizer.exp_avg.{key}") == "float32"
    parameter = trainer.model.get_parameter("decoder.layers.1.self_attention.linear_qkv.weight")
    stored = torch.from_numpy(reader.read(key)[1]).view(torch.bfloat16)
    assert torch.equal(stored, parameter.detach())


@pytest.mark.parametrize("llama", [False, True])
def test_export_of_a_checkpoint_is_the_trainers_own(
    make_trainer: Any, make_folder: Any, helpers: Any, tmp_path: Path, llama: bool
) -> None:
    from safetensors.torch import load_file

    folder = make_folder(**(helpers.llama if llama else {}))
    (folder / "tokenizer.json").write_text("{}")
    trainer = make_trainer(path=folder)
    _steps(trainer, helpers, 1, seed=1)
    path = trainer.save_checkpoint(tmp_path / "checkpoints", META, "n").path
    trainer.export_hf(tmp_path / "one")
    export_checkpoint(path, folder, tmp_path / "two")
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys() == load_file(folder / "model.safetensors").keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert (tmp_path / "two" / "tokenizer.json").read_text() == "{}"
    assert make_trainer(path=tmp_path / "two").weights_digest() == _digest_after(make_trainer, folder, path)


def _digest_after(make_trainer: Any, folder: Path, path: Path) -> str:
    trainer = make_trainer(path=folder)
    trainer.load_checkpoint(path)
    return str(trainer.weights_digest())


def test_a_full_disk_leaves_nothing_behind_and_costs_nothing(
    make_trainer: Any, helpers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer()
    _steps(trainer, helpers, 1, seed=1)
    folder = tmp_path / "checkpoints"
    first = trainer.save_checkpoint(folder, CheckpointMeta(1, 1, 1), "a")
    calls = iter(range(100))

    def full(descriptor: int) -> None:
        if next(calls) == 4:
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("gyre.ledger.chunks.os.fsync", full)
        with pytest.raises(UserError, match="is full: free space, then gyre resume") as caught:
            trainer.save_checkpoint(folder, CheckpointMeta(1, 2, 2), "b")
    assert caught.value.code == 1 and "\n" not in str(caught.value)
    assert [path.name for path in folder.iterdir()] == [first.path.name]
    trainer.save_checkpoint(folder, CheckpointMeta(1, 2, 2), "c")
    found, _ = newest_complete(folder)
    assert found is not None and found.meta.step == 2


def test_training_goes_on_while_a_checkpoint_is_written(
    make_trainer: Any, helpers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gyre.training.saving.SMALL_BYTES", 0)
    gate = threading.Event()
    writing = checkpoints.finish

    def held(*arguments: Any) -> Path:
        assert gate.wait(60)
        return writing(*arguments)

    monkeypatch.setattr("gyre.ledger.checkpoints.finish", held)
    trainer = make_trainer()
    _steps(trainer, helpers, 1, seed=1)
    saved = trainer.weights_digest()
    assert trainer.begin_checkpoint(tmp_path, META, "n") is True
    _steps(trainer, helpers, 1, seed=2)  # the next step is made while the write is held
    after = trainer.weights_digest()
    assert after != saved
    assert trainer.checkpoint_written() is None
    assert newest_complete(tmp_path) == (None, [])  # nothing counts before COMPLETE
    gate.set()
    info = trainer.checkpoint_written(wait=True)
    assert info is not None
    assert info.meta.step == META.step
    assert trainer.checkpoint_written(wait=True) is None  # told once
    trainer.load_checkpoint(info.path)
    assert trainer.weights_digest() == saved  # what was saved is the state of that moment
    _steps(trainer, helpers, 1, seed=2)
    assert trainer.weights_digest() == after


def test_a_write_in_the_background_that_fails_is_told_at_the_next_call(
    make_trainer: Any, helpers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gyre.training.saving.SMALL_BYTES", 0)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    trainer = make_trainer()
    _steps(trainer, helpers, 1, seed=1)
    with monkeypatch.context() as patch:
        patch.setattr("gyre.ledger.chunks.os.fsync", full)
        assert trainer.begin_checkpoint(tmp_path, META, "n") is True
        with pytest.raises(UserError, match="is full: free space, then gyre resume"):
            trainer.checkpoint_written(wait=True)
    assert list(tmp_path.glob("step-*")) == []
    assert trainer.begin_checkpoint(tmp_path, META, "m") is True  # there is room again
    assert trainer.checkpoint_written(wait=True) is not None


@pytest.mark.parametrize("small", [1 << 40, 0])
def test_small_checkpoints_and_full_memory_are_written_at_once(
    make_trainer: Any, helpers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: int
) -> None:
    monkeypatch.setattr("gyre.training.saving.SMALL_BYTES", small)
    if not small:
        monkeypatch.setattr("gyre.training.memory.available_on_host", lambda: 1000)
    trainer = make_trainer()
    _steps(trainer, helpers, 1, seed=1)
    assert trainer.begin_checkpoint(tmp_path, META, "n") is False
    found, _ = newest_complete(tmp_path)
    assert found is not None


@pytest.mark.parametrize("damage", ["truncated", "a flipped bit", "a missing chunk", "no COMPLETE"])
def test_a_damaged_checkpoint_is_passed_over_with_a_line(
    make_trainer: Any, helpers: Any, tmp_path: Path, damage: str
) -> None:
    trainer = make_trainer()
    _steps(trainer, helpers, 1, seed=1)
    older = trainer.save_checkpoint(tmp_path, CheckpointMeta(1, 1, 1), "a")
    newer = trainer.save_checkpoint(tmp_path, CheckpointMeta(1, 2, 2), "b").path
    chunk = next(iter(sorted(newer.glob("optimizer.exp_avg.decoder*/c.1.0.0"))))
    content = bytearray(chunk.read_bytes())
    if damage == "truncated":
        chunk.write_bytes(content[:-5])
    elif damage == "a flipped bit":
        content[100] ^= 1
        chunk.write_bytes(content)
    elif damage == "a missing chunk":
        chunk.unlink()
    else:
        (newer / "COMPLETE").unlink()
    found, passed = newest_complete(tmp_path)
    assert found is not None
    assert found.path == older.path
    (line,) = passed
    assert newer.name in line
    assert "COMPLETE" in line if damage == "no COMPLETE" else chunk.name in line


def test_a_batch_of_a_ledgers_microstep_knows_what_is_comparable(helpers: Any) -> None:
    batch = helpers.make_batch(LENGTHS)
    count, samples = len(batch.samples), len(batch.advantages)
    versions = np.arange(count, dtype=np.int32) % 2 + 4
    microstep = MicroStep(
        step=1,
        tokens=batch.tokens,
        positions=batch.positions,
        segments=batch.segments,
        target_rows=batch.target_rows,
        target_tokens=batch.target_tokens,
        behaviour_logprobs=batch.behaviour_logprobs,
        target_samples=batch.samples,
        target_turns=np.zeros(count, np.int32),
        target_offsets=np.arange(count, dtype=np.int32),
        target_versions=versions,
        target_lineages=np.ones(count, np.int32),
        executions=("e",) * samples,
        attempts=np.zeros(samples, np.int32),
        advantages=batch.advantages,
        weights=batch.weights,
        temperatures=batch.temperatures,
        dispatch_versions=np.full(samples, 4, np.int32),
    )
    made = MicroStepBatch.of(microstep, weights=(1, 5))
    assert made.comparable is not None and np.array_equal(made.comparable, versions == 5)
    other, unpublished = MicroStepBatch.of(microstep, weights=(2, 5)), MicroStepBatch.of(microstep)
    assert other.comparable is not None and not other.comparable.any()
    assert unpublished.comparable is not None and not unpublished.comparable.any()
    assert np.array_equal(made.samples, batch.samples)
