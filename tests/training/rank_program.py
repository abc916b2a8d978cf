"""One rank of the two-rank tests: `python rank_program.py FOLDER RANK KIND`, KIND is tensor or data.

Reads FOLDER/model and FOLDER/batch-*.npz, FOLDER/one.zarr (a checkpoint of one rank); writes
FOLDER/out-RANK.npz.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from gyre.ledger.checkpoints import CheckpointMeta
from gyre.training.batch import MicroStepBatch
from gyre.training.layout import Layout
from gyre.training.settings import TrainSettings
from gyre.training.trainer import Trainer


def main(folder: Path, rank: int, kind: str) -> None:
    torch.set_num_threads(1)
    tensor, data = (2, 1) if kind == "tensor" else (1, 2)
    layout = Layout(rank, 2, tensor=tensor, data=data, rendezvous=f"file://{folder}/rendezvous-{kind}")
    trainer = Trainer(folder / "model", TrainSettings(clip=(0.9, 0.9)), layout, core=True)
    batches = [MicroStepBatch(**np.load(path)) for path in sorted(folder.glob("batch-*.npz"))]
    mine = batches if kind == "tensor" else batches[rank::2]

    trainer.load_hf()
    logprobs = [trainer.logprobs(batch).numpy() for batch in batches]
    for batch in mine:
        trainer.train_microstep(batch)
    stats = trainer.commit(4, 1e-3)
    trainer.save_checkpoint(folder / f"checkpoints-{kind}", CheckpointMeta(1, 1, 1), "n")
    stepped = {name: tensor.numpy() for name, tensor in trainer.hf_tensors()}

    trainer.load_checkpoint(folder / "one.zarr")
    loaded = {f"loaded.{name}": tensor.numpy() for name, tensor in trainer.hf_tensors()}
    for batch in mine:
        trainer.train_microstep(batch)
    trainer.commit(4, 1e-3)
    resumed = {f"resumed.{name}": tensor.numpy() for name, tensor in trainer.hf_tensors()}
    arrays = {"logprobs": np.concatenate(logprobs), "norm": np.array(stats.grad_norm)}
    arrays |= {f"stepped.{name}": value for name, value in stepped.items()} | loaded | resumed
    np.savez(folder / f"out-{kind}-{rank}.npz", allow_pickle=False, **arrays)
    trainer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
