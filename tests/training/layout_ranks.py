"""One rank of the layout tests: `python layout_ranks.py FOLDER RANK`, four ranks in all.

Goes through every layout of every case, twice, in one process; ranks that a layout does not have sit it out. First
each trains a step from the case's model and saves FOLDER/CASE/LAYOUT; then those that are crossed load what each of
them saved, save it again as FOLDER/CASE/SAVER-LOADER, and go on for a step. What is not in a checkpoint lies in
FOLDER/out-CASE-LAYOUT.npz.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from gyre.ledger.checkpoints import CheckpointMeta, final_path
from gyre.training.batch import MicroStepBatch
from gyre.training.layout import Layout
from gyre.training.settings import TrainSettings
from gyre.training.trainer import Trainer

RANKS = 4
SHAPES: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tensor": 2},
    "pp2": {"pipeline": 2},
    "dp2": {"data": 2},
    "tp2pp2": {"tensor": 2, "pipeline": 2},
    "sp2": {"tensor": 2, "sequence": True},
    "sp2pp2": {"tensor": 2, "sequence": True, "pipeline": 2},
    "sp2dp2": {"tensor": 2, "sequence": True, "data": 2},
    "ep2": {"data": 2, "expert": 2},
    "ep4": {"data": 4, "expert": 4},
    "dp4ep2": {"data": 4, "expert": 2},
    "pp2ep2": {"pipeline": 2, "data": 2, "expert": 2},
    "sp2ep2": {"tensor": 2, "sequence": True, "expert": 2},
}
DENSE = ("one", "tp2", "pp2", "dp2", "tp2pp2")


class Case(NamedTuple):
    model: str
    dtype: Any
    layouts: tuple[str, ...]
    crossed: tuple[str, ...]
    """Layouts that load what every one of them has saved."""


CASES = {
    "float32": Case("tied", "float32", (*DENSE, "sp2pp2", "sp2dp2"), DENSE),
    "bfloat16": Case("untied", "bfloat16", (*DENSE, "sp2"), DENSE),
    "biases": Case("biases", "float32", ("one", "sp2"), ()),
    "experts": Case(
        "experts",
        "float32",
        ("one", "dp2", "pp2", "sp2", "ep2", "sp2ep2", "dp4ep2", "pp2ep2"),
        ("one", "sp2", "dp4ep2", "pp2ep2"),
    ),
    "replayed": Case("experts", "float32", ("one", "pp2", "sp2", "ep2", "sp2ep2"), ()),
    "experts-bfloat16": Case("experts", "bfloat16", ("one", "ep2", "sp2"), ("one", "ep2")),
}
META = CheckpointMeta(1, 1, 1)


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    plain = [MicroStepBatch(**np.load(path)) for path in sorted(folder.glob("batch-*.npz"))]
    drawn = [np.load(path) for path in sorted(folder.glob("experts-*.npy"))]
    replayed = [replace(batch, experts=experts) for batch, experts in zip(plain, drawn, strict=True)]
    for case in CASES:
        for name, trainer in trainers(folder, rank, case, CASES[case].layouts, "first"):
            trainer.load_hf()
            batches = replayed if case == "replayed" else plain
            out: dict[str, Any] = {"logprobs": np.concatenate([trainer.logprobs(batch).numpy() for batch in batches])}
            # two grants, the first of them short
            stats = [*trainer.train_microsteps(batches[:1]), *trainer.train_microsteps(batches[1:])]
            out["losses"] = np.array([each.loss for each in stats])
            out["norm"] = np.array(trainer.commit(4, 1e-3).grad_norm)
            trainer.save_checkpoint(folder / case / name, META, "n")
            if rank == 0:
                np.savez(folder / f"out-{case}-{name}.npz", allow_pickle=False, **out)
            trainer.export_hf(folder / case / f"{name}-hf")
    for case in CASES:
        for name, trainer in trainers(folder, rank, case, CASES[case].crossed, "again"):
            norms = {}
            for saver in CASES[case].crossed:
                trainer.load_checkpoint(final_path(folder / case / saver, 1))
                trainer.save_checkpoint(folder / case / f"{saver}-{name}", META, "n")
                trainer.train_microsteps(plain)
                norms[saver] = np.array(trainer.commit(4, 1e-3).grad_norm)
            if rank == 0:
                np.savez(folder / f"norms-{case}-{name}.npz", allow_pickle=False, **norms)


def trainers(folder: Path, rank: int, case: str, layouts: Sequence[str], phase: str) -> Iterator[tuple[str, Trainer]]:
    """A trainer in each layout that has this rank. Rank 0 is in all of them, so nobody gets ahead of it."""
    for name in layouts:
        shape = SHAPES[name]
        world = math.prod(shape.get(part, 1) for part in ("tensor", "pipeline", "data"))
        if rank >= world:
            continue
        layout = Layout(rank, world, **shape, rendezvous=f"file://{folder}/rendezvous-{phase}-{case}-{name}")
        settings = TrainSettings(dtype=CASES[case].dtype, clip=(0.9, 0.9))
        trainer = Trainer(folder / CASES[case].model, settings, layout, core=True)
        try:
            yield name, trainer
        finally:
            trainer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
