"""Sampling from logits:

Temperature only, so the log-probability of a token is that of the distribution it came from.
"""

from __future__ import annotations

import torch

# An exponential draw below this has probability 1e-20; the floor keeps its logarithm finite.
_SMALLEST = 1e-20


def sample(
    logits: torch.Tensor,
    temperatures: list[float],
    generators: list[torch.Generator | None],
    shared: torch.Generator,
) -> tuple[list[int], list[float]]:
    """Draw one token a row.

    logits: [rows, vocabulary] float32. Temperature 0 takes the likeliest token and reports the log-probability at
    temperature 1, as SGLang does. A row with a generator of its own draws from it, whatever the batch. Draws are
    argmax(log p + Gumbel noise). Returns (token ids, natural log-probabilities).
    """
    greedy = torch.tensor([t == 0.0 for t in temperatures])
    scale = torch.tensor([t or 1.0 for t in temperatures]).unsqueeze(1)
    logp = torch.log_softmax(logits / scale, dim=-1)
    noise = torch.empty_like(logp).exponential_(generator=shared)
    for row, generator in enumerate(generators):
        if generator is not None:
            noise[row].exponential_(generator=generator)
    gumbel = noise.clamp_min_(_SMALLEST).log_().neg_()
    gumbel.masked_fill_(greedy.unsqueeze(1), 0.0)
    ids = (logp + gumbel).argmax(dim=-1)
    chosen = logp.gather(1, ids.unsqueeze(1)).squeeze(1)
    return ids.tolist(), chosen.tolist()


def token_logprobs(logits: torch.Tensor, tokens: list[int]) -> list[float]:
    """Log-probability (temperature 1) of one given token a row; logits: [rows, vocabulary] float32."""
    logp = torch.log_softmax(logits, dim=-1)
    return logp.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1).tolist()
