"""Replay of the engine's routing: the experts are those that were recorded, their weights the router's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from gyre.ledger.routing import NO_EXPERTS, Mixture
from gyre.training.batch import MicroStepBatch, to_device
from gyre.training.routing_replay import Choice

LENGTHS = [37, 20, 5]
KINDS = pytest.mark.parametrize("kind", ["experts", "experts-not-normalised"])


def routers_choice(trainer: Any, batch: MicroStepBatch, monkeypatch: pytest.MonkeyPatch) -> npt.NDArray[np.uint16]:
    """What the routers choose for each row when nothing is replayed."""
    seen: list[torch.Tensor] = []
    replayed = Choice.get_replay_topk

    def noting(self: Choice, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        found = replayed(self, *args, **kwargs)
        seen.append(found[1])
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Choice, "get_replay_topk", noting)
        trainer.logprobs(batch)
    return torch.stack(seen, dim=1).numpy().astype(np.uint16)


@KINDS
def test_replay_of_the_routers_own_choice_changes_nothing(
    make_folder: Any, make_trainer: Any, helpers: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(path=make_folder(**helpers.kinds[kind]))
    batch = helpers.make_batch(LENGTHS, padding=3)
    own, plain = routers_choice(trainer, batch, monkeypatch), trainer.logprobs(batch)
    assert own.shape == (len(batch.tokens), trainer.architecture.layers, trainer.architecture.experts_per_token)
    for experts in (own, np.full_like(own, NO_EXPERTS)):
        assert torch.equal(trainer.logprobs(replace(batch, experts=experts)), plain)
    others = replace(batch, experts=helpers.draw_experts(batch, trainer.architecture.mixture()))
    assert float((trainer.logprobs(others) - plain).abs().max()) > 1e-3
    assert torch.equal(trainer.logprobs(batch), plain)  # nothing of a replay is left


@KINDS
def test_a_layer_weighs_the_given_experts_by_its_router(
    make_folder: Any, make_trainer: Any, helpers: Any, kind: str
) -> None:
    """Against a loop over tokens and experts, and the router's own choice in every other row."""
    trainer = make_trainer(path=make_folder(**helpers.kinds[kind]))
    mixture, batch = trainer.architecture.mixture(), helpers.make_batch([8])
    experts = helpers.draw_experts(batch, mixture, seed=3)
    experts[::2] = NO_EXPERTS
    layer = trainer.model.decoder.layers[1].mlp
    hidden = torch.randn(8, 1, trainer.architecture.hidden, generator=torch.Generator().manual_seed(0))
    with trainer.model.choices.replayed(to_device(replace(batch, experts=experts), trainer.device).experts):
        found, _ = layer(hidden)
    logits = hidden[:, 0] @ layer.router.weight.T
    for row in range(8):
        chosen = logits[row].topk(mixture.chosen).indices.tolist() if row % 2 == 0 else experts[row, 1].tolist()
        weights = logits[row].softmax(0)[chosen]
        if trainer.architecture.normalise_experts:
            weights = weights / weights.sum()
        parts = [layer.experts.local_experts[expert](hidden[row : row + 1])[0][0, 0] for expert in chosen]
        expected = sum(weight * part for weight, part in zip(weights, parts, strict=True))
        assert float((found[row, 0] - expected).abs().max()) <= 1e-5


def test_routers_learn_from_experts_that_they_did_not_choose(make_folder: Any, make_trainer: Any, helpers: Any) -> None:
    trainer = make_trainer(path=make_folder(**helpers.experts))
    batch = helpers.make_batch(LENGTHS)
    before = [layer.mlp.router.weight.clone() for layer in trainer.model.decoder.layers]
    trainer.train_microstep(replace(batch, experts=helpers.draw_experts(batch, trainer.architecture.mixture())))
    trainer.commit(1, 1e-3)
    assert all(
        not torch.equal(layer.mlp.router.weight, old)
        for layer, old in zip(trainer.model.decoder.layers, before, strict=True)
    )


def test_experts_of_another_model_train_nothing(helpers: Any) -> None:
    batch = helpers.make_batch([8])
    mixture = Mixture(layers=2, experts=4, chosen=2)
    good = helpers.draw_experts(batch, mixture)
    replace(batch, experts=good).check(700, mixture)
    bad = good.copy()
    bad[3, 1, 0] = 4
    for experts, model, message in (
        (bad, mixture, r"experts must lie in \[0, 4\)"),
        (good[:-1], mixture, "not this model's"),
        (good[:, :1], mixture, "not this model's"),
        (good, None, "not this model's"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(batch, experts=experts).check(700, model)


def test_padding_has_no_experts(helpers: Any) -> None:
    batch = helpers.make_batch([7])
    padded = replace(batch, experts=helpers.draw_experts(batch, Mixture(layers=2, experts=4, chosen=2))).padded(4)
    assert padded.experts.shape == (8, 2, 2) and (padded.experts[7] == NO_EXPERTS).all()
    on_device = to_device(padded, torch.device("cpu")).experts
    assert on_device is not None and on_device[7].tolist() == [[-1, -1], [-1, -1]]
