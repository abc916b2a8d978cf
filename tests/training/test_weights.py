"""Flat weights, digests, names for engines, memory, and layouts that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gyre.errors import UserError
from gyre.training import flat, memory
from gyre.training.architecture import read_architecture
from gyre.training.layout import Layout
from gyre.training.memory import OffloadedTensors, bytes_of
from gyre.training.settings import TrainSettings
from gyre.training.trainer import Trainer

LENGTHS = [37, 20]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_flat_weights_carry_a_step_to_another_cell(make_trainer: Any, helpers: Any, dtype: str) -> None:
    core = make_trainer(dtype=dtype, clip=(0.5, 0.5))
    core.train_microstep(helpers.make_batch(LENGTHS))
    core.commit(1, 1e-2)
    (buffer,), digest = core.weights_flat(), core.weights_digest()
    assert buffer.is_contiguous() and buffer.dtype == getattr(torch, dtype)
    satellite = make_trainer(core=False, dtype=dtype)
    assert satellite.weights_digest() != digest
    (staging,) = satellite.weights_staging()
    satellite.set_weights_flat([staging.copy_(buffer)])
    assert satellite.weights_digest() == digest == flat.digest([buffer])
    for wrong in ([], [buffer[:-1]], [buffer.double()]):
        with pytest.raises(ValueError, match="buffer"):
            satellite.set_weights_flat(wrong)


def test_published_weights_stand_while_training_goes_on(make_trainer: Any, helpers: Any) -> None:
    trainer = make_trainer()
    published, digest = trainer.weights_flat(), trainer.weights_digest()
    trainer.train_microstep(helpers.make_batch(LENGTHS))
    trainer.commit(1, 1e-2)
    assert flat.digest(published) == digest != trainer.weights_digest()


def test_set_weights_reach_the_optimizers_copies(make_trainer: Any, helpers: Any) -> None:
    trainer = make_trainer(dtype="bfloat16", gradient_clip=1e9)
    (buffer,) = trainer.weights_flat()
    trainer.set_weights_flat([torch.zeros_like(buffer)])
    trainer.add_gradients([torch.ones_like(b) for b in trainer.gradients_flat()])
    trainer.commit(1, 1e-3)
    assert float(trainer.weights_flat()[0].float().abs().max()) <= 1.1e-3


def test_hf_tensors_are_the_folders(folder: Path, make_trainer: Any) -> None:
    from safetensors.torch import load_file

    stored = load_file(folder / "model.safetensors")
    given = dict(make_trainer(core=False).hf_tensors())
    assert given.keys() == stored.keys()
    assert all(torch.equal(given[name], stored[name]) for name in stored)


def test_combined_digest() -> None:
    assert flat.combined_digest(["ab"]) == "ab"
    assert flat.combined_digest(["ab", "cd"]) != flat.combined_digest(["cd", "ab"])


def test_offloaded_tensors_come_back_bit_for_bit_with_their_views() -> None:
    whole = torch.arange(100.0)
    view, other = whole[10:20], torch.arange(7)
    tensors = [whole, view, other]
    assert bytes_of(tensors) == 400 + 56
    offloaded = OffloadedTensors()
    assert offloaded.offload(tensors) == 456
    assert bytes_of([whole]) == 0
    assert offloaded.offload(tensors) == 0  # what has moved stays away
    assert offloaded.onload() == 456
    assert torch.equal(whole, torch.arange(100.0)) and torch.equal(other, torch.arange(7))
    view.zero_()
    assert float(whole[10:20].sum()) == 0.0


def test_offload_of_a_trainer_on_cpu_reports_bytes(make_trainer: Any, helpers: Any) -> None:
    satellite = make_trainer(core=False)
    parameters = sum(p.numel() for p in satellite.model.parameters())
    assert satellite.offload().nbytes == satellite.onload().nbytes == 8 * parameters
    assert satellite.offload(weights=False).nbytes == 4 * parameters
    core = make_trainer()
    core.train_microstep(helpers.make_batch(LENGTHS))
    core.commit(1, 1e-3)
    assert core.offload().nbytes == 16 * parameters
    assert core.offload(weights=False).nbytes == 12 * parameters
    assert core.offload().free > 0


def test_memory_that_was_given_back_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device: `measured` returns when the bytes are free, and fails when something else has taken them."""
    free = iter([100, 100, 120, 164, 164])
    monkeypatch.setattr(memory, "free_bytes", lambda device: next(free))
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda: None)
    moved = memory.measured(torch.device("cuda"), lambda: 64, frees=True)
    assert (moved.nbytes, moved.free) == (64, 164)
    monkeypatch.setattr(memory, "free_bytes", lambda device: 100)
    monkeypatch.setattr(memory, "FREE_SECONDS", 0.0)
    with pytest.raises(RuntimeError, match="64 bytes were given back, but 0 more are free"):
        memory.measured(torch.device("cuda"), lambda: 64, frees=True)


def test_offloading_does_not_disturb_training(make_trainer: Any, helpers: Any) -> None:
    """What a GPU does, forced here: weights, gradients and moments leave and return between two
    micro-steps."""
    digests = []
    for moved in (False, True):
        trainer = make_trainer(clip=(0.5, 0.5))
        for seed in range(2):
            trainer.train_microstep(helpers.make_batch(LENGTHS, seed=seed))
            if moved:
                offloaded = OffloadedTensors()
                offloaded.offload(trainer._device_tensors())
                offloaded.onload()
            trainer.train_microstep(helpers.make_batch(LENGTHS, seed=seed + 5))
            trainer.commit(1, 1e-3)
        digests.append(trainer.weights_digest())
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("layout", "word"),
    [
        (Layout(world=2), "ranks"),
        (Layout(world=3, pipeline=3, rendezvous="file:///x"), "pipeline_parallel = 3 does not divide"),
        (Layout(world=3, tensor=3, rendezvous="file:///x"), "does not divide"),
    ],
)
def test_a_layout_that_does_not_divide_is_refused(folder: Path, layout: Layout, word: str) -> None:
    with pytest.raises(UserError, match=word):
        layout.check(read_architecture(folder))
    with pytest.raises(UserError, match=word):
        Trainer(folder, TrainSettings(), layout, core=False)
    assert not dist.is_initialized()


def test_settings_are_those_of_the_recipe() -> None:
    from gyre.recipe.schema import Model, Objective, Recipe, Tasks, Train

    recipe = Recipe(
        name="x",
        model=Model(dtype="float32"),
        tasks=Tasks(path="t"),
        objective=Objective(name="grpo", clip=(0.1, 0.2)),
        train=Train(steps=1, weight_decay=0.5, gradient_clip=2.0, adam_betas=(0.8, 0.9)),
    )
    settings = TrainSettings.of(recipe)
    assert (settings.dtype, settings.objective, settings.clip) == ("float32", "grpo", (0.1, 0.2))
    assert (settings.weight_decay, settings.gradient_clip, settings.adam_betas) == (0.5, 2.0, (0.8, 0.9))
