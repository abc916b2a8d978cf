"""Contributions: sums of cells' halves are the whole, in a fixed order bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

LENGTHS = [37, 20, 51, 44]


def _total(trainer: Any, helpers: Any, own: list[Any], contributions: list[Any], early: bool) -> torch.Tensor:
    """Own micro-steps plus contributions, merged before (`early`) or after the last of the own ones."""
    trainer.zero_gradients()
    for index, batch in enumerate(own):
        if early and index == len(own) - 1:
            for one in contributions:
                trainer.add_gradients(one.buffers)
        trainer.train_microstep(batch)
    if not early:
        for one in contributions:
            trainer.add_gradients(one.buffers)
    trainer._gradients.total(1.0)
    return torch.cat([buffer.clone() for buffer in trainer.gradients_flat()])


def _contribution(trainer: Any, *batches: Any) -> Any:
    trainer.zero_gradients()
    for batch in batches:
        trainer.train_microstep(batch)
    return trainer.freeze()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gradient_is_the_same_bits_each_time_and_after_a_commit(make_trainer: Any, helpers: Any, dtype: str) -> None:
    trainer = make_trainer(clip=(0.5, 0.5), dtype=dtype)
    batch = helpers.make_batch(LENGTHS)
    for _ in range(2):
        trainer.train_microstep(batch)
        trainer.commit(1, 1e-3)
    weights = trainer.weights_flat()
    again = [helpers.gradient(trainer, batch, batch) for _ in range(2)]
    assert torch.equal(again[0], again[1])
    fresh = make_trainer(core=False, clip=(0.5, 0.5), dtype=dtype)
    fresh.set_weights_flat(weights)
    assert torch.equal(helpers.gradient(fresh, batch, batch), again[0])


def test_the_halves_of_two_cells_are_the_whole(make_trainer: Any, helpers: Any) -> None:
    trainer = make_trainer(clip=(0.5, 0.5))
    paths = [helpers.take(helpers.make_batch(LENGTHS), [path]) for path in range(4)]
    whole = helpers.gradient(trainer, *paths)
    half = _contribution(trainer, paths[2], paths[3])
    assert helpers.close_in_norm(_total(trainer, helpers, paths[:2], [half], early=False), whole)


def test_the_sum_does_not_depend_on_when_contributions_arrive(make_trainer: Any, helpers: Any) -> None:
    trainer = make_trainer(clip=(0.5, 0.5))
    paths = [helpers.take(helpers.make_batch(LENGTHS), [path]) for path in range(4)]
    offered = [_contribution(trainer, paths[2]), _contribution(trainer, paths[3])]
    again = [_contribution(trainer, paths[2]), _contribution(trainer, paths[3])]
    assert [one.digest for one in offered] == [one.digest for one in again]
    late = _total(trainer, helpers, paths[:2], offered, early=False)
    early = _total(trainer, helpers, paths[:2], again, early=True)
    assert torch.equal(late, early)


def test_frozen_buffers_are_copies(make_trainer: Any, helpers: Any) -> None:
    trainer = make_trainer()
    batch = helpers.make_batch(LENGTHS)
    frozen = _contribution(trainer, batch)
    before = [buffer.clone() for buffer in frozen.buffers]
    trainer.train_microstep(batch)
    trainer.zero_gradients()
    assert all(torch.equal(one, other) for one, other in zip(frozen.buffers, before, strict=True))
    assert not any(bool(buffer.any()) for buffer in trainer.gradients_flat())


def test_a_foreign_buffer_is_refused_and_adds_nothing(make_trainer: Any, helpers: Any) -> None:
    trainer = make_trainer()
    frozen = _contribution(trainer, helpers.make_batch(LENGTHS))
    for wrong in ([], [frozen.buffers[0][:-1]], [frozen.buffers[0].double()]):
        with pytest.raises(ValueError, match="contribution"):
            trainer.add_gradients(wrong)
    trainer.zero_gradients()
    assert trainer.commit(1, 1e-3).skipped == "no targets"


def test_stats_of_a_microstep(make_trainer: Any, helpers: Any) -> None:
    from dataclasses import replace

    trainer = make_trainer(clip=(0.2, 0.2))
    batch = helpers.make_batch(LENGTHS, padding=5)
    exact = replace(batch, behaviour_logprobs=trainer.logprobs(batch).numpy())
    stats = trainer.train_microstep(exact)
    assert (stats.tokens, stats.targets, stats.samples, stats.units) == (152, len(batch.target_rows), 4, 4)
    assert stats.difference_max <= 1e-5 and stats.clipped == 0
    assert stats.ratio_mean == pytest.approx(1.0, abs=1e-5)
    assert 0.0 < stats.entropy_mean < 6.4
    assert stats.loss == pytest.approx(-float((batch.weights * batch.advantages).sum()), rel=1e-4)
    some = replace(exact, comparable=np.arange(stats.targets) < 5)
    assert (trainer.train_microstep(some).compared, stats.compared) == (5, stats.targets)
    off = replace(exact, behaviour_logprobs=exact.behaviour_logprobs - 0.5)
    stats = trainer.train_microstep(off)
    assert stats.difference_mean == pytest.approx(0.5, abs=1e-5)
    assert stats.difference_sum == pytest.approx(0.5 * stats.targets, rel=1e-4)
    assert stats.clipped == int((batch.advantages > 0).sum())
    assert stats.ratio_max == pytest.approx(1.6487, abs=1e-3)


def test_a_microstep_without_targets_adds_nothing(make_trainer: Any, helpers: Any) -> None:
    from dataclasses import replace

    trainer = make_trainer()
    batch = helpers.make_batch([6, 7])
    names = ("target_rows", "target_tokens", "behaviour_logprobs", "samples")
    stats = trainer.train_microstep(replace(batch, **{name: getattr(batch, name)[:0] for name in names}))
    assert (stats.targets, stats.units, stats.loss, stats.difference_max) == (0, 0, 0.0, 0.0)
    assert stats.entropy_mean == 0.0
    assert not any(bool(buffer.any()) for buffer in trainer.gradients_flat())
