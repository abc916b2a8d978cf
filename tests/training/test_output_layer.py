"""The output layer's memory, counted in rows and elements of logits, not by a clock or a profiler."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

CHUNK = 16


class WideRows(TorchDispatchMode):
    """The most rows of any tensor as wide as the vocabulary that an operation made, but for the weight's own."""

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.vocab, self.hidden, self.most = vocab, hidden, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else (out,):
            wide = isinstance(each, torch.Tensor) and each.dim() > 1 and each.size(-1) == self.vocab
            if wide and each.size(-2) != self.hidden:
                self.most = max(self.most, each.numel() // self.vocab)
        return out


def test_logits_exist_for_one_chunk_at_a_time_and_none_are_kept(make_trainer: Any, helpers: Any) -> None:
    """Forward and backward: with n targets the whole of the logits would be n rows, and a softmax of n rows kept."""
    trainer = make_trainer(targets_per_chunk=CHUNK)
    vocab, hidden = trainer.architecture.vocab, trainer.architecture.hidden
    batch = helpers.make_batch([200, 120])
    targets = len(batch.target_rows)
    assert targets > 8 * CHUNK and hidden > CHUNK
    kept: list[int] = []

    def count(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() > 1 and tensor.size(-1) == vocab and tensor.size(-2) != hidden:
            kept.append(tensor.numel() // vocab)
        return tensor

    with WideRows(vocab, hidden) as rows, saved_tensors_hooks(count, lambda tensor: tensor):
        trainer.train_microstep(batch)
    assert 0 < rows.most <= CHUNK
    assert not kept

    whole = make_trainer()  # the count can tell
    with WideRows(vocab, hidden) as rows, saved_tensors_hooks(count, lambda tensor: tensor):
        whole.train_microstep(batch)
    assert rows.most == targets == max(kept)
