"""Log-probabilities and entropies against torch's own softmax."""

from __future__ import annotations

import torch

from gyre.objective.logprobs import vocab_parallel_logprobs


def _naive(logits: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor) -> tuple[torch.Tensor, ...]:
    log_softmax = (logits.double() / temperatures.double()[:, None]).log_softmax(dim=1)
    entropy = -(log_softmax.exp() * log_softmax).sum(dim=1)
    return log_softmax.gather(1, targets[:, None])[:, 0], entropy


def _case(rows: int = 37, vocab: int = 101) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = 5 * torch.randn(rows, vocab, generator=generator)
    targets = torch.randint(0, vocab, (rows,), generator=generator)
    return logits, targets, 0.5 + torch.rand(rows, generator=generator)


def test_values_and_gradient_equal_the_naive_ones() -> None:
    logits, targets, temperatures = _case()
    ours, naive = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    coefficients = torch.linspace(-1, 1, len(targets))
    logprobs, entropy = vocab_parallel_logprobs(ours, targets, temperatures)
    expected, expected_entropy = _naive(naive, targets, temperatures)
    torch.testing.assert_close(logprobs.double(), expected, atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(entropy.double(), expected_entropy, atol=2e-6, rtol=1e-6)
    (logprobs * coefficients).sum().backward()
    (expected * coefficients).sum().backward()
    torch.testing.assert_close(ours.grad, naive.grad, atol=1e-6, rtol=1e-5)


def test_the_logits_are_not_written_to() -> None:
    logits, targets, temperatures = _case()
    before = logits.clone()
    vocab_parallel_logprobs(logits, targets, temperatures)
    assert torch.equal(logits, before)


def test_large_logits_neither_overflow_nor_lose_the_target() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [3e4, 3e4, 3e4]])
    logprobs, entropy = vocab_parallel_logprobs(logits, torch.tensor([0, 2]), torch.ones(2))
    torch.testing.assert_close(logprobs, torch.tensor([0.0, -(torch.tensor(3.0).log())]))
    torch.testing.assert_close(entropy, torch.tensor([0.0, torch.tensor(3.0).log()]))


def test_bfloat16_logits_are_computed_in_fp32_and_get_a_bfloat16_gradient() -> None:
    logits, targets, temperatures = _case()
    half = logits.bfloat16().requires_grad_()
    logprobs, _ = vocab_parallel_logprobs(half, targets, temperatures)
    expected, _ = _naive(half.detach().float(), targets, temperatures)
    assert logprobs.dtype is torch.float32
    torch.testing.assert_close(logprobs.double(), expected, atol=2e-6, rtol=1e-6)
    logprobs.sum().backward()
    assert half.grad is not None and half.grad.dtype is torch.bfloat16


def test_no_targets_give_nothing() -> None:
    logprobs, entropy = vocab_parallel_logprobs(torch.zeros(0, 7), torch.zeros(0, dtype=torch.int64), torch.zeros(0))
    assert logprobs.shape == entropy.shape == (0,)
