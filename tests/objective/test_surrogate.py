"""Objectives against naive loops, and the laws that micro-steps rest on."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from gyre.objective.surrogate import OBJECTIVES, Surrogate, surrogate

CLIP = (0.2, 0.3)
NAMES = sorted(OBJECTIVES)
_PER_TARGET = ("new_logprobs", "behaviour_logprobs", "samples")


def _case(seed: int, counts: list[int], spread: float = 0.5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    total = sum(counts)
    behaviour = -3 * torch.rand(total, generator=generator)
    return {
        "new_logprobs": behaviour + spread * torch.randn(total, generator=generator),
        "behaviour_logprobs": behaviour,
        "samples": torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)),
        "advantages": torch.randn(len(counts), generator=generator),
        "weights": torch.rand(len(counts), generator=generator) + 0.1,
    }


def _run(name: str, case: dict[str, torch.Tensor]) -> tuple[Surrogate, torch.Tensor]:
    new = case["new_logprobs"].clone().requires_grad_()
    result = surrogate(name, **(case | {"new_logprobs": new}), clip=CLIP)
    result.loss.backward()
    assert new.grad is not None
    return result, new.grad


def _naive(name: str, new: torch.Tensor, case: dict[str, torch.Tensor]) -> torch.Tensor:
    """The formulas, one sample and one target at a time."""
    low, high = CLIP
    loss = torch.zeros(())
    for j, (advantage, weight) in enumerate(zip(case["advantages"], case["weights"], strict=True)):
        rows = (case["samples"] == j).nonzero()[:, 0].tolist()
        if not rows:
            continue
        logs = [new[i] - case["behaviour_logprobs"][i] for i in rows]
        if name == "gspo":
            ratio = torch.exp(torch.stack(logs).mean())
            value = torch.min(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
        else:
            values = []
            for i, log in zip(rows, logs, strict=True):
                ratio = torch.exp(log)
                if name == "grpo":
                    values.append(torch.min(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage))
                else:
                    bounded = ratio.clamp(1 - low if name == "cispo" else None, 1 + high).detach()
                    values.append(bounded * advantage * new[i])
            value = sum(values) / len(rows)
        loss = loss - weight * value
    return loss


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradient_equal_a_naive_loop(name: str) -> None:
    case = _case(1, [3, 1, 0, 7, 5])
    result, gradient = _run(name, case)
    new = case["new_logprobs"].clone().requires_grad_()
    expected = _naive(name, new, case)
    expected.backward()
    torch.testing.assert_close(result.loss, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(gradient, new.grad, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 999), counts=st.lists(st.integers(1, 6), min_size=2, max_size=6), data=st.data())
@settings(max_examples=25, deadline=None)
def test_losses_of_a_split_add_up_to_the_whole(name: str, seed: int, counts: list[int], data: st.DataObject) -> None:
    case = _case(seed, counts)
    cut = data.draw(st.integers(1, len(counts) - 1))
    rows = sum(counts[:cut])
    head = {key: value[: rows if key in _PER_TARGET else cut] for key, value in case.items()}
    tail = {key: value[rows if key in _PER_TARGET else cut :] for key, value in case.items()}
    tail["samples"] = tail["samples"] - cut
    whole, gradient = _run(name, case)
    parts = [_run(name, head), _run(name, tail)]
    torch.testing.assert_close(sum(part.loss for part, _ in parts), whole.loss, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.cat([part for _, part in parts]), gradient, atol=1e-6, rtol=1e-5)
    assert sum(part.units for part, _ in parts) == whole.units
    assert sum(part.clipped for part, _ in parts) == whole.clipped


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 999), padding=st.integers(1, 5))
@settings(max_examples=15, deadline=None)
def test_samples_of_zero_weight_change_nothing(name: str, seed: int, padding: int) -> None:
    case = _case(seed, [2, 4, 3])
    extra = _case(seed + 1, [padding])
    extra["samples"] = extra["samples"] + 3
    extra["weights"] = torch.zeros(1)
    padded = {key: torch.cat([value, extra[key]]) for key, value in case.items()}
    plain, gradient = _run(name, case)
    result, padded_gradient = _run(name, padded)
    torch.testing.assert_close(result.loss, plain.loss)
    torch.testing.assert_close(padded_gradient[:9], gradient)
    assert not padded_gradient[9:].any()
    assert (result.units, result.clipped, result.ratio_max) == (plain.units, plain.clipped, plain.ratio_max)


def test_gspo_clips_a_sample_whole_and_gives_it_no_gradient() -> None:
    case = _case(5, [4, 4, 4, 4], spread=0.0)
    case["advantages"] = torch.tensor([1.0, -1.0, 1.0, -1.0])
    shifts = torch.tensor([1.0, -1.0, -1.0, 1.0])  # up and good: clipped; down and bad: clipped; the others are not
    case["new_logprobs"] = case["behaviour_logprobs"] + shifts[case["samples"]]
    result, gradient = _run("gspo", case)
    assert (result.units, result.clipped) == (4, 2)
    assert not gradient[:8].any()
    assert (gradient[8:] != 0).all()
    assert result.ratio_max == pytest.approx(math.e, rel=1e-5)


def test_gspo_at_equal_policies_is_the_weighted_mean_gradient() -> None:
    case = _case(2, [2, 5], spread=0.0)
    result, gradient = _run("gspo", case)
    expected = -(case["weights"] * case["advantages"] / torch.tensor([2.0, 5.0]))[case["samples"]]
    torch.testing.assert_close(gradient, expected)
    assert (result.ratio_min, result.ratio_max, result.clipped) == (1.0, 1.0, 0)


def test_grpo_drops_clipped_targets_and_keeps_their_neighbours() -> None:
    case = _case(2, [3], spread=0.0)
    case["advantages"] = torch.ones(1)
    case["new_logprobs"] = case["behaviour_logprobs"] + torch.tensor([0.0, 1.0, 0.0])
    result, gradient = _run("grpo", case)
    assert (result.units, result.clipped) == (3, 1)
    assert (gradient != 0).tolist() == [True, False, True]


@pytest.mark.parametrize("name", NAMES)
def test_an_absurd_ratio_gives_finite_numbers(name: str) -> None:
    case = _case(2, [2, 2])
    case["new_logprobs"] = case["behaviour_logprobs"] + torch.tensor([500.0, 500.0, -500.0, -500.0])
    result, gradient = _run(name, case)
    assert torch.isfinite(result.loss) and torch.isfinite(gradient).all()


def test_an_unknown_objective_is_refused() -> None:
    with pytest.raises(KeyError):
        surrogate("ppo", **_case(1, [1]), clip=CLIP)
