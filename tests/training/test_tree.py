"""Trees against paths: the same log-probabilities and gradient from fewer tokens."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from gyre.ledger.microsteps import MicroStep
from gyre.ledger.training_stats import differences
from gyre.objective.surrogate import OBJECTIVES
from gyre.training import block_attention
from gyre.training.attention import Packing, SegmentAttention
from gyre.training.batch import MicroStepBatch
from tests.training.forked import forked, packed, place_of_targets

BOUND = 400


def executions() -> dict[str, list[MicroStep]]:
    samples = [s for i in range(2) for s in forked(f"g0-{i:02}", i).samples(BOUND, advantage=(1.0, -0.7)[i])]
    return {packing: packed(samples, packing, BOUND) for packing in ("paths", "tree")}


def logprobs_by_place(trainer: Any, microsteps: list[MicroStep]) -> dict[tuple[str, int, int], float]:
    values = torch.cat([trainer.logprobs(MicroStepBatch.of(each)) for each in microsteps]).tolist()
    return dict(zip(place_of_targets(microsteps), values, strict=True))


@pytest.mark.parametrize("objective", sorted(OBJECTIVES))
def test_a_tree_trains_what_its_paths_train(make_trainer: Any, helpers: Any, objective: str) -> None:
    trainer = make_trainer(objective=objective, clip=(0.3, 0.3))
    made = executions()
    assert sum(len(each.tokens) for each in made["tree"]) < 0.7 * sum(len(each.tokens) for each in made["paths"])
    paths, tree = (logprobs_by_place(trainer, made[packing]) for packing in ("paths", "tree"))
    assert paths.keys() == tree.keys()
    assert max(abs(paths[place] - tree[place]) for place in paths) <= 1e-5
    batches = {packing: [MicroStepBatch.of(each) for each in made[packing]] for packing in made}
    whole = helpers.gradient(trainer, *batches["paths"])
    assert float(whole.norm()) > 0.1
    assert helpers.close_in_norm(helpers.gradient(trainer, *batches["tree"]), whole, 1e-5)


def test_a_samples_ratio_is_over_its_own_targets_though_its_prefix_is_shared(make_trainer: Any) -> None:
    """Units, clipped samples and extremes of the ratio are the paths'."""
    trainer = make_trainer(clip=(0.05, 0.05))
    counts, ratios = {}, {}
    for packing, microsteps in executions().items():
        stats = [trainer.train_microstep(MicroStepBatch.of(each, (1, 0))) for each in microsteps]
        assert all(isinstance(value, int | float) for s in stats for value in s.row().values())
        assert sum(d.units for s in stats for d in differences(s.row())) == 10
        counts[packing] = (sum(s.units for s in stats), sum(s.clipped for s in stats))
        extremes = (min(s.ratio_min for s in stats), max(s.ratio_max for s in stats))
        ratios[packing] = (*extremes, sum(s.ratio_mean * s.units for s in stats))
    assert counts["tree"] == counts["paths"]
    assert counts["tree"][0] == 10 and 0 < counts["tree"][1] < 10
    assert ratios["tree"] == pytest.approx(ratios["paths"], rel=1e-5)


PACKINGS = [
    Packing(lengths=(5, 3, 4, 2, 6), parents=(-1, 0, 1, 0, -1)),
    Packing(lengths=(130, 70, 129, 300, 1, 200), parents=(-1, 0, 1, 1, 0, -1)),
    Packing(lengths=(256, 128, 128), parents=(-1, 0, 0)),
]


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("padding", [0, 7])
def test_segments_block_mask_and_dense_mask_are_one_attention(packing: Packing, padding: int) -> None:
    rows = sum(packing.lengths) + padding
    torch.manual_seed(1)
    q, k, v = (torch.randn(rows, 1, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    attention = SegmentAttention.__new__(SegmentAttention)
    torch.nn.Module.__init__(attention)
    attention.scale = None
    by_segment = attention(q, k, v, packed_seq_params=packing)
    dense = attention(q, k, v, packing.dense_mask(rows))
    real = rows - padding
    torch.testing.assert_close(by_segment[:real], dense[:real], atol=1e-6, rtol=1e-5)
    assert not by_segment[real:].any()
    weight = torch.randn_like(dense[:real])
    gradients = [torch.autograd.grad((out[:real] * weight).sum(), (q, k, v)) for out in (by_segment, dense)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)

    transposed = [each.detach()[:, 0].transpose(0, 1)[None] for each in (q, k, v)]
    by_block = block_attention.attend(*transposed, packing, None, compiled=False)
    torch.testing.assert_close(
        by_block[0].transpose(0, 1).reshape(rows, 1, -1), by_segment.detach(), atol=1e-6, rtol=1e-5
    )


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_block_mask_is_the_one_that_pytorch_finds_from_all_pairs(packing: Packing) -> None:
    rows = sum(packing.lengths) + 9
    ours = block_attention.block_mask(packing, rows, torch.device("cpu"))
    theirs = create_block_mask(ours.mask_mod, None, None, rows, rows, device="cpu", BLOCK_SIZE=block_attention.BLOCK)
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    assert torch.equal(ours.full_kv_num_blocks, theirs.full_kv_num_blocks)


@pytest.mark.parametrize(
    ("parents", "what"),
    [
        ((-1, 0, 1, 0, 2), "preorder"),
        ((-1, 0), "2 parents"),
        ((-1, 1, 0, 0, 0), "preorder"),
        ((0, 0, 0, 0, 0), "preorder"),
    ],
)
def test_a_tree_that_is_not_in_preorder_is_refused(helpers: Any, parents: tuple[int, ...], what: str) -> None:
    batch = helpers.make_batch([3, 4, 2, 3, 5])
    with pytest.raises(ValueError, match=what):
        replace(batch, parents=np.array(parents, np.int32)).packing()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_tree_under_tensor_parallelism_is_the_paths_on_one_rank(
    make_trainer: Any, folder: Path, helpers: Any, tmp_path: Path
) -> None:
    trainer = make_trainer(clip=(0.3, 0.3))
    made = executions()
    paths = logprobs_by_place(trainer, made["paths"])
    trainer.zero_gradients()
    for each in made["paths"]:
        trainer.train_microstep(MicroStepBatch.of(each))
    norm = trainer.commit(2, 1e-3).grad_norm
    stepped = {name: tensor.numpy() for name, tensor in trainer.hf_tensors()}

    (tmp_path / "model").symlink_to(folder)
    for index, each in enumerate(made["tree"]):
        batch = dataclasses.asdict(MicroStepBatch.of(each))
        np.savez(tmp_path / f"batch-{index}.npz", **{k: v for k, v in batch.items() if v is not None})
    trainer.close()
    program = Path(__file__).with_name("tree_rank.py")
    ranks = [
        subprocess.Popen([sys.executable, str(program), str(tmp_path), str(rank)], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=200)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors)[-3000:]
    for rank, sequence in product(range(2), range(2)):
        out = np.load(tmp_path / f"out-{rank}-{sequence}.npz")
        tree = dict(zip(place_of_targets(made["tree"]), out["logprobs"].tolist(), strict=True))
        assert max(abs(paths[place] - tree[place]) for place in paths) <= 1e-5
        assert float(out["norm"]) == pytest.approx(norm, rel=1e-5)
        for name, value in stepped.items():
            assert np.abs(out[name] - value).mean() <= 1e-6
