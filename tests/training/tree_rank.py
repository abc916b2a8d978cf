"""One of two tensor-parallel ranks that train the micro-steps FOLDER/batch-*.npz: `python tree_rank.py FOLDER RANK`.

Without and with sequence parallelism. Writes FOLDER/out-RANK-N.npz, N = 0, 1: log-probabilities before the step, the
gradient's norm, the weights after it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from gyre.training.batch import MicroStepBatch
from gyre.training.layout import Layout
from gyre.training.settings import TrainSettings
from gyre.training.trainer import Trainer


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    for sequence in (False, True):
        train(folder, rank, sequence)


def train(folder: Path, rank: int, sequence: bool) -> None:
    rendezvous = f"file://{folder}/rendezvous-{sequence:d}"
    layout = Layout(rank, 2, tensor=2, sequence=sequence, rendezvous=rendezvous)
    trainer = Trainer(folder / "model", TrainSettings(clip=(0.3, 0.3)), layout, core=True)
    trainer.load_hf()
    batches = [MicroStepBatch(**np.load(path)) for path in sorted(folder.glob("batch-*.npz"))]
    logprobs = np.concatenate([trainer.logprobs(batch).numpy() for batch in batches])
    for batch in batches:
        trainer.train_microstep(batch)
    norm = trainer.commit(2, 1e-3).grad_norm
    weights = {name: tensor.numpy() for name, tensor in trainer.hf_tensors()}
    np.savez(
        folder / f"out-{rank}-{sequence:d}.npz", allow_pickle=False, logprobs=logprobs, norm=np.array(norm), **weights
    )
    trainer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
