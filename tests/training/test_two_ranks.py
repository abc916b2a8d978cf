"""Two ranks of one cell, tensor- or data-parallel, against one rank; checkpoints between the layouts."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gyre.ledger.checkpoints import CheckpointMeta, verify

PROGRAM = Path(__file__).with_name("rank_program.py")


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", ["tensor", "data"])
def test_two_ranks_do_what_one_does(make_trainer: Any, folder: Path, helpers: Any, tmp_path: Path, kind: str) -> None:
    work = tmp_path / "work"
    shutil.copytree(folder, work / "model")
    batches = [helpers.make_batch([37, 20, 51], seed=seed) for seed in range(2)]
    for index, batch in enumerate(batches):
        np.savez(
            work / f"batch-{index}.npz",
            **{k: v for k, v in dataclasses.asdict(batch).items() if v is not None},
        )

    one = make_trainer(clip=(0.9, 0.9))
    logprobs = np.concatenate([one.logprobs(batch).numpy() for batch in batches])
    for batch in batches:
        one.train_microstep(batch)
    norm = one.commit(4, 1e-3).grad_norm
    stepped = {name: tensor.numpy() for name, tensor in one.hf_tensors()}
    one.save_checkpoint(work, CheckpointMeta(1, 1, 1), "n").path.rename(work / "one.zarr")
    for batch in batches:
        one.train_microstep(batch)
    one.commit(4, 1e-3)
    resumed = {name: tensor.numpy() for name, tensor in one.hf_tensors()}

    _run_two(work, kind)
    outs = [np.load(work / f"out-{kind}-{rank}.npz") for rank in range(2)]
    for out in outs:
        assert np.abs(out["logprobs"] - logprobs).max() <= 1e-5
        assert float(out["norm"]) == pytest.approx(norm, rel=1e-5)
        for name, value in stepped.items():
            # Adam divides by the root of a squared gradient: where that is tiny, rounding shows as up to a
            # step's size.
            assert np.abs(out[f"stepped.{name}"] - value).mean() <= 1e-6
            assert np.array_equal(out[f"loaded.{name}"], value)
            assert np.abs(out[f"resumed.{name}"] - resumed[name]).mean() <= 1e-6

    path = work / f"checkpoints-{kind}" / "step-000001.zarr"
    assert verify(path) == []
    one.load_checkpoint(path)
    for name, tensor in one.hf_tensors():
        assert np.array_equal(tensor.numpy(), outs[0][f"stepped.{name}"])


def _run_two(work: Path, kind: str) -> None:
    processes = [
        subprocess.Popen([sys.executable, str(PROGRAM), str(work), str(rank), kind], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=200)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)[-3000:]
