"""One rank of the layout tests: `python layout_ranks.py FOLDER RANK`, four ranks in all.

Goes through every layout, twice, in one process; ranks that a layout does not have sit it out. First each trains a step
from FOLDER/model and saves FOLDER/DTYPE/LAYOUT; then each loads what every layout saved, saves it again as
FOLDER/DTYPE/SAVER-LOADER, and goes on for a step. What is not in a checkpoint lies in FOLDER/out-DTYPE-LAYOUT.npz.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gyre.ledger.checkpoints import CheckpointMeta, final_path
from gyre.training.batch import MicroStepBatch
from gyre.training.layout import Layout
from gyre.training.settings import TrainSettings
from gyre.training.trainer import Trainer

RANKS = 4
LAYOUTS = {"one": (1, 1, 1), "tp2": (2, 1, 1), "pp2": (1, 2, 1), "dp2": (1, 1, 2), "tp2pp2": (2, 2, 1)}
DTYPES = {"float32": "tied", "bfloat16": "untied"}
META = CheckpointMeta(1, 1, 1)


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    batches = [MicroStepBatch(**np.load(path)) for path in sorted(folder.glob("batch-*.npz"))]
    for dtype in DTYPES:
        for name, trainer in trainers(folder, rank, dtype, "first"):
            trainer.load_hf()
            out: dict[str, Any] = {"logprobs": np.concatenate([trainer.logprobs(batch).numpy() for batch in batches])}
            out["losses"] = np.array([stats.loss for stats in trainer.train_microsteps(batches)])
            out["norm"] = np.array(trainer.commit(4, 1e-3).grad_norm)
            trainer.save_checkpoint(folder / dtype / name, META, "n")
            if rank == 0:
                np.savez(folder / f"out-{dtype}-{name}.npz", allow_pickle=False, **out)
    for dtype in DTYPES:
        for name, trainer in trainers(folder, rank, dtype, "again"):
            norms = {}
            for saver in LAYOUTS:
                trainer.load_checkpoint(final_path(folder / dtype / saver, 1))
                trainer.save_checkpoint(folder / dtype / f"{saver}-{name}", META, "n")
                trainer.train_microsteps(batches)
                norms[saver] = np.array(trainer.commit(4, 1e-3).grad_norm)
            if rank == 0:
                np.savez(folder / f"norms-{dtype}-{name}.npz", allow_pickle=False, **norms)


def trainers(folder: Path, rank: int, dtype: Any, phase: str) -> Iterator[tuple[str, Trainer]]:
    """A trainer in each layout that has this rank. Rank 0 is in all of them, so nobody gets ahead of it."""
    for name, (tensor, pipeline, data) in LAYOUTS.items():
        world = tensor * pipeline * data
        if rank >= world:
            continue
        rendezvous = f"file://{folder}/rendezvous-{phase}-{dtype}-{name}"
        layout = Layout(rank, world, tensor, pipeline, data, rendezvous)
        settings = TrainSettings(dtype=dtype, clip=(0.9, 0.9))
        trainer = Trainer(folder / DTYPES[dtype], settings, layout, core=True)
        try:
            yield name, trainer
        finally:
            trainer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
