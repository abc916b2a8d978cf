"""The model against transformers, and packing against separate sequences."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gyre.training.attention import Packing

LENGTHS = [37, 64, 5, 50]


@pytest.mark.parametrize(
    "kind", ["qwen3", "llama-biases", "llama-mlp-bias", "qwen2", "experts", "experts-not-normalised"]
)
def test_logprobs_equal_transformers_on_packed_segments(
    make_folder: Any, make_trainer: Any, helpers: Any, kind: str, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    folder = make_folder(**helpers.kinds[kind])
    batch = helpers.make_batch(LENGTHS, padding=9)
    trainer = make_trainer(path=folder)
    ours = trainer.logprobs(batch)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    theirs = _transformers_logprobs(reference, batch)
    assert float((ours - theirs).abs().max()) <= 1e-5

    trainer.train_microstep(batch)
    trainer.commit(1, 1e-3)
    trainer.export_hf(tmp_path / "out")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, attn_implementation="eager")
    trained = trainer.logprobs(batch)
    assert float((trained - ours).abs().max()) > 1e-3
    assert float((trained - _transformers_logprobs(exported, batch)).abs().max()) <= 1e-5


def _transformers_logprobs(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """One path at a time, whole logits."""
    out = torch.zeros(len(batch.target_rows))
    for path in range(len(batch.advantages)):
        rows = np.flatnonzero(batch.segments == path)
        with torch.no_grad():
            logits = model(torch.from_numpy(batch.tokens[rows].astype(np.int64))[None]).logits[0]
        logprobs = (logits / float(batch.temperatures[path])).log_softmax(dim=-1)
        for index in np.flatnonzero(batch.samples == path):
            out[index] = logprobs[batch.target_rows[index] - rows[0], batch.target_tokens[index]]
    return out


def test_packed_and_separate_paths_give_the_same_logprobs_and_gradient(make_trainer: Any, helpers: Any) -> None:
    trainer = make_trainer(clip=(0.5, 0.5))
    batch = helpers.make_batch(LENGTHS, padding=13)
    apart = [helpers.take(batch, [path]) for path in range(len(LENGTHS))]
    packed = trainer.logprobs(batch)
    separate = torch.cat([trainer.logprobs(one) for one in apart])
    torch.testing.assert_close(packed, separate, atol=1e-5, rtol=0)
    whole = helpers.gradient(trainer, batch)
    assert float(whole.norm()) > 0.1
    assert helpers.close_in_norm(helpers.gradient(trainer, *apart), whole)


def test_a_dense_mask_is_the_packing(make_trainer: Any, helpers: Any) -> None:
    trainer = make_trainer()
    batch = helpers.make_batch(LENGTHS)
    tokens, positions = (torch.from_numpy(v.astype(np.int64)) for v in (batch.tokens, batch.positions))
    segments = torch.from_numpy(batch.segments)
    hidden = segments[:, None] != segments[None, :]
    mask = hidden | torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1)
    with torch.no_grad():
        packed = trainer.model(tokens, positions, batch.packing())
        masked = trainer.model(tokens, positions, attention_mask=mask[None, None])
        torch.testing.assert_close(packed, masked, atol=1e-5, rtol=1e-5)
        single = trainer.model(tokens[:37], positions[:37])
        torch.testing.assert_close(packed[:37], single, atol=1e-5, rtol=1e-5)


def test_positions_count_and_padding_does_not(make_trainer: Any, helpers: Any) -> None:
    trainer = make_trainer()
    plain = trainer.logprobs(helpers.make_batch([40]))
    padded = helpers.make_batch([40])
    padded = replace(
        padded,
        tokens=np.concatenate([padded.tokens, np.zeros(8, np.int32)]),
        positions=np.concatenate([padded.positions, np.arange(8, dtype=np.int32)]),
        segments=np.concatenate([padded.segments, np.full(8, -1, np.int32)]),
    )
    torch.testing.assert_close(trainer.logprobs(padded), plain, atol=1e-6, rtol=0)
    stretched = helpers.make_batch([40])
    stretched = replace(stretched, positions=stretched.positions * 2)
    assert float((trainer.logprobs(stretched) - plain).abs().max()) > 1e-3


def test_chunks_of_the_output_layer_change_nothing(make_trainer: Any, helpers: Any) -> None:
    batch = helpers.make_batch(LENGTHS)
    whole = make_trainer(clip=(0.5, 0.5))
    logprobs, gradient = whole.logprobs(batch), helpers.gradient(whole, batch)
    chunked = make_trainer(clip=(0.5, 0.5), targets_per_chunk=7)
    torch.testing.assert_close(chunked.logprobs(batch), logprobs, atol=1e-6, rtol=0)
    assert helpers.close_in_norm(helpers.gradient(chunked, batch), gradient)


def test_bfloat16_is_near(make_trainer: Any, helpers: Any) -> None:
    batch = helpers.make_batch(LENGTHS)
    full = make_trainer().logprobs(batch)
    half = make_trainer(dtype="bfloat16").logprobs(batch)
    assert float((full - half).abs().mean()) <= 2e-2 and float((full - half).abs().max()) <= 0.15


def test_segments_must_be_contiguous_and_padding_last(helpers: Any) -> None:
    batch = helpers.make_batch([3, 4], padding=2)
    assert batch.packing() == Packing(lengths=(3, 4))
    for segments in ([0, 1, 0, 1, 1, 1, 1, -1, -1], [-1, 0, 0, 0, 1, 1, 1, 1, -1]):
        with pytest.raises(ValueError, match="contiguous"):
            replace(batch, segments=np.array(segments, np.int32)).packing()


@pytest.mark.parametrize(
    ("field", "values"), [("tokens", 601), ("target_rows", 9), ("samples", 2), ("target_tokens", -1)]
)
def test_a_batch_out_of_range_is_refused(make_trainer: Any, helpers: Any, field: str, values: int) -> None:
    trainer = make_trainer()
    batch = helpers.make_batch([4, 5])
    broken = replace(batch, **{field: np.full_like(getattr(batch, field), values)})
    with pytest.raises(ValueError, match=field):
        trainer.train_microstep(broken)
    assert not any(bool(buffer.any()) for buffer in trainer.gradients_flat())
