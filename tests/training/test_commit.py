"""The optimizer step against torch's own AdamW, and the steps that are skipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gyre.recipe.schema import Train
from gyre.training.settings import learning_rate

LENGTHS = [37, 20, 51]


def _by_name(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


@pytest.mark.parametrize("clip", [1e6, 0.05])
def test_commit_is_a_plain_adamw_step(make_trainer: Any, helpers: Any, clip: float) -> None:
    trainer = make_trainer(clip=(0.9, 0.9), weight_decay=0.1, gradient_clip=clip)
    batch = helpers.make_batch(LENGTHS)
    reference = {name: torch.nn.Parameter(value) for name, value in _by_name(trainer).items()}
    decayed = [p for p in reference.values() if p.dim() > 1]
    plain = [p for p in reference.values() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    for _ in range(3):
        trainer.zero_gradients()
        trainer.train_microstep(batch)
        for name, parameter in trainer.model.named_parameters():
            reference[name].grad = parameter.main_grad.detach().clone() / 4
        norm = torch.nn.utils.clip_grad_norm_(list(reference.values()), clip)
        adam.step()
        stats = trainer.commit(4, 1e-3)
        assert stats.grad_norm == pytest.approx(float(norm), rel=1e-5)
        assert (stats.clipped, stats.skipped) == (float(norm) > clip, "")
        for name, value in _by_name(trainer).items():
            torch.testing.assert_close(value, reference[name].detach(), atol=1e-6, rtol=0)
        assert not any(bool(buffer.any()) for buffer in trainer.gradients_flat())


@pytest.mark.parametrize("targets", [0, None])
def test_a_step_without_targets_skips_the_optimizer(make_trainer: Any, helpers: Any, targets: int | None) -> None:
    trainer = make_trainer()
    trainer.train_microstep(helpers.make_batch(LENGTHS))
    trainer.commit(1, 1e-3)
    before = trainer.weights_digest()
    stats = trainer.commit(16, 1e-3, targets)
    assert (stats.skipped, stats.grad_norm, stats.clipped) == ("no targets", 0.0, False)
    assert trainer.weights_digest() == before


def test_zero_advantages_with_targets_still_step(make_trainer: Any, helpers: Any) -> None:
    trainer = make_trainer()
    trainer.train_microstep(helpers.make_batch(LENGTHS))
    trainer.commit(1, 1e-3)
    before = trainer.weights_digest()
    assert trainer.commit(16, 1e-3, targets=5).skipped == ""
    assert trainer.weights_digest() != before  # Adam's momentum moves on


def test_a_gradient_that_is_not_finite_changes_nothing(make_trainer: Any, helpers: Any) -> None:
    trainer = make_trainer()
    before = trainer.weights_digest()
    frozen = trainer.freeze()
    frozen.buffers[0][3] = float("nan")
    trainer.add_gradients(frozen.buffers)
    assert trainer.commit(2, 1e-3, targets=1).skipped == "gradient not finite"
    assert trainer.weights_digest() == before
    trainer.train_microstep(helpers.make_batch(LENGTHS))
    assert trainer.commit(2, 1e-3).skipped == ""


def test_only_the_core_commits_until_a_satellite_is_promoted(make_trainer: Any, helpers: Any) -> None:
    trainer = make_trainer(core=False)
    trainer.train_microstep(helpers.make_batch(LENGTHS))
    with pytest.raises(RuntimeError, match="only the core"):
        trainer.commit(1, 1e-3)
    assert not trainer.core
    trainer.promote()
    trainer.promote()
    assert trainer.core and trainer.commit(1, 1e-3).skipped == ""


def test_learning_rate_warms_up_and_stays() -> None:
    train = Train(steps=6, learning_rate=8.0, warmup_steps=4)
    assert [learning_rate(step, train) for step in range(7)] == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0, 8.0]
    assert learning_rate(0, Train(steps=1, learning_rate=3.0)) == 3.0
    with pytest.raises(ValueError, match="negative"):
        learning_rate(-1, train)


def test_learning_rate_decays_to_its_share_at_the_last_step() -> None:
    linear = Train(steps=6, learning_rate=8.0, warmup_steps=2, decay="linear", decay_to=0.25)
    assert [learning_rate(step, linear) for step in range(8)] == [4.0, 8.0, 6.5, 5.0, 3.5, 2.0, 2.0, 2.0]
    cosine = Train(steps=5, learning_rate=8.0, decay="cosine")
    assert [learning_rate(step, cosine) for step in range(5)] == pytest.approx(
        [8.0, 4 + 4 * 0.5**0.5, 4.0, 4 - 4 * 0.5**0.5, 0.0]
    )
    for steps in (1, 2, 3):
        for decay in ("constant", "linear", "cosine"):
            all_warm = Train(steps=steps, learning_rate=2.0, warmup_steps=3, decay=decay)  # type: ignore[arg-type]
            assert learning_rate(steps - 1, all_warm) == pytest.approx(2.0 * steps / 3)
