"""From a checkpoint to a Hugging Face folder, without process groups or Megatron.

Owns nothing: it reads global arrays and writes tensors. Invariant: the exported tensors are the checkpoint's
parameters, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from gyre.ledger.checkpoints import CheckpointReader
from gyre.training.architecture import Architecture, read_architecture
from gyre.training.convert import to_hf
from gyre.training.folder import write_hf
from gyre.training.names import checkpoint_key, mapping, megatron_names


def export_checkpoint(checkpoint: Path, model_folder: Path, out: Path) -> None:
    """Write a folder that transformers loads. `model_folder` gives config and tokenizer; whoever chose the checkpoint
    has verified it (`gyre.ledger.checkpoints.chosen`)."""
    write_hf(_tensors(CheckpointReader(checkpoint), read_architecture(model_folder)), model_folder, out)


def _tensors(reader: CheckpointReader, architecture: Architecture) -> Iterator[tuple[str, torch.Tensor]]:
    for name in megatron_names(architecture):
        entry = mapping(name)
        key, place = checkpoint_key(name)
        data = reader.read(key, tuple(slice(index, index + 1) for index in place))[(0,) * len(place)]
        if reader.dtype(key) == "bfloat16":
            tensor = torch.from_numpy(data.view(np.uint16)).view(torch.bfloat16)
        else:
            tensor = torch.from_numpy(data)
        yield from zip(entry.hf, to_hf(entry, [tensor], architecture), strict=True)
