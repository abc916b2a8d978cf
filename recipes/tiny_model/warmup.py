"""The warm start: a random Qwen3 model, trained on demonstrations until it solves some tasks and misses others.

Invariant: the same seed gives the same weights (one torch thread, one generator for the demonstrations); the loss is
over the assistant's tokens alone.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM

from recipes.tiny_model.conversation import END, encode
from recipes.tiny_model.demonstrations import demonstration
from recipes.tiny_model.vocabulary import PADDING, token_id

Progress = Callable[[int, int, str], None]
"""Called with (steps done, steps in all, what is going on)."""


Row = tuple[list[int], list[bool]]
"""The tokens of one conversation, and which of them are targets."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How the warm start goes; the defaults are the quickstart's: about a minute, then half of the tasks are solved."""

    steps: int = 520
    batch: int = 16
    learning_rate: float = 3e-3
    rise: int = 30
    """Steps over which the learning rate rises."""
    clean: float = 0.80
    """Share of the steps whose demonstrations are all right: they end near 1.0. The noisy tail sets the start."""
    right: float = 0.45
    """Share of right demonstrations in the noisy tail."""

    def rate(self, step: int) -> float:
        """Learning rate of `step`: linear rise, then a cosine down to a tenth."""
        cosine = 0.5 * (1 + math.cos(math.pi * step / self.steps))
        return self.learning_rate * min(1.0, (step + 1) / self.rise) * (0.1 + 0.9 * cosine)


def new_model(tokenizer: Tokenizer, seed: int) -> Qwen3ForCausalLM:
    """A random model of about 0.4M parameters in fp32. `initializer_range` decides how fast one this small learns."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=96,
        intermediate_size=288,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=token_id(tokenizer, END),
        pad_token_id=token_id(tokenizer, PADDING),
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def batch_of(rows: list[Row], padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and targets, both [rows, longest], padded on the right (causal attention never looks there)."""
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.full((len(rows), longest), padding, dtype=torch.long)
    targets = torch.zeros((len(rows), longest), dtype=torch.bool)
    for index, (row, wanted) in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row)
        targets[index, : len(row)] = torch.tensor(wanted)
    return ids, targets


def common_start(rows: list[list[int]]) -> int:
    """How many tokens all rows begin with."""
    first, last = min(rows), max(rows)
    pairs = enumerate(zip(first, last, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(last)))


def loss_on_targets(model: Qwen3ForCausalLM, rows: list[Row], padding: int) -> torch.Tensor:
    """Mean cross-entropy over the target tokens of `rows`.

    The tokens that all rows begin with (system prompt and tool) run once, not once a row: half of the work. The head
    runs on the positions before targets only.
    """
    ids, targets = batch_of(rows, padding)
    shared = common_start([row for row, _ in rows])
    cache = model.model(input_ids=ids[:1, :shared], use_cache=True).cache
    cache.batch_repeat_interleave(len(rows))
    hidden = model.model(input_ids=ids[:, shared:], cache=cache, use_cache=True).last_hidden_state[:, :-1]
    after, wanted = ids[:, shared + 1 :], targets[:, shared + 1 :]
    return functional.cross_entropy(model.lm_head(hidden[wanted]), after[wanted])


def warm_start(model: Qwen3ForCausalLM, tokenizer: Tokenizer, plan: Plan, seed: int, progress: Progress) -> None:
    """Train `model` in place."""
    rng = random.Random(f"demonstrations {seed}")
    padding = token_id(tokenizer, PADDING)
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    model.train()
    for step in range(plan.steps):
        right = 1.0 if step < plan.clean * plan.steps else plan.right
        rows = [encode(tokenizer, demonstration(rng, rng.random() < right)) for _ in range(plan.batch)]
        loss = loss_on_targets(model, rows, padding)
        for group in optimizer.param_groups:
            group["lr"] = plan.rate(step)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        progress(step + 1, plan.steps, f"warm start, loss {loss.item():.3f}")
    model.eval()
