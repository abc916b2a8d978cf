"""Weights between the model and a Hugging Face folder.

Owns reading and writing of safetensors. Invariant: a folder that lacks a tensor of the model, or holds one
that the model does not know, is refused before any weight changes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gyre.errors import UserError
from gyre.training.architecture import Architecture
from gyre.training.convert import to_hf, to_megatron
from gyre.training.names import hf_names, mapping

_DERIVED = ("rotary_emb.inv_freq",)
"""Old folders store these; they follow from config.json."""


def load_hf(model: torch.nn.Module, folder: Path, architecture: Architecture, parallel: int = 1, rank: int = 0) -> None:
    """Fill the model (one tensor-parallel rank's shard) from `folder`, cast to the parameters' dtype.
    UserError when the folder does not hold this architecture."""
    with ExitStack() as stack:
        files = _open(folder, architecture, stack)
        for name, parameter in model.named_parameters():
            entry = mapping(name)
            tensors = [files[tensor].get_tensor(tensor) for tensor in entry.hf]
            shard = to_megatron(entry, tensors, architecture, parallel, rank)
            if shard.shape != parameter.shape:
                raise UserError(f"{folder}: {entry.hf[0]} has shape {tuple(tensors[0].shape)}, unlike config.json")
            with torch.no_grad():
                parameter.copy_(shard)


def hf_tensors(
    model: torch.nn.Module, architecture: Architecture, group: dist.ProcessGroup | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the Hugging Face naming, whole, as a host copy, one parameter in memory at a time.

    With a tensor-parallel `group` this is a collective: every rank must run the iterator to its end.
    """
    for name, parameter in model.named_parameters():
        entry = mapping(name)
        shards = _gather(parameter.detach(), group)
        for hf, tensor in zip(entry.hf, to_hf(entry, shards, architecture), strict=True):
            yield hf, tensor.to("cpu", copy=True)


def write_hf(tensors: Iterator[tuple[str, torch.Tensor]], model_folder: Path, out: Path) -> None:
    """A folder that transformers loads: config and tokenizer of `model_folder`, weights of `tensors`."""
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    for path in sorted(Path(model_folder).iterdir()):
        if path.is_file() and not path.name.endswith((".safetensors", ".safetensors.index.json", ".bin", ".pt")):
            shutil.copyfile(path, out / path.name)
    whole = {name: tensor.contiguous().clone() for name, tensor in tensors}
    dtype = str(next(iter(whole.values())).dtype).removeprefix("torch.")
    config = json.loads((out / "config.json").read_text())
    config["dtype" if "torch_dtype" not in config else "torch_dtype"] = dtype
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(whole, out / "model.safetensors", metadata={"format": "pt"})


def _gather(shard: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    if group is None or dist.get_world_size(group) == 1:
        return [shard]
    shards = [torch.empty_like(shard) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shards, shard.contiguous(), group=group)
    return shards


def _open(folder: Path, architecture: Architecture, stack: ExitStack) -> dict[str, Any]:
    """Tensor name -> the open file that holds it, complete for the architecture."""
    from safetensors import SafetensorError, safe_open

    paths = sorted(Path(folder).glob("*.safetensors"))
    if not paths:
        raise UserError(f"{folder}: no *.safetensors files; convert the model first")
    files: dict[str, Any] = {}
    for path in paths:
        try:
            file = stack.enter_context(safe_open(path, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: cannot be read ({error})") from None
        files.update(dict.fromkeys(file.keys(), file))
    expected = set(hf_names(architecture))
    missing = sorted(expected - files.keys())
    if missing:
        raise UserError(f"{folder}: tensor {missing[0]} is missing ({len(missing)} in all)")
    extra = sorted(name for name in files.keys() - expected if not name.endswith(_DERIVED))
    if architecture.tied:
        extra = [name for name in extra if name != "lm_head.weight"]
    if extra:
        raise UserError(f"{folder}: tensor {extra[0]} belongs to no supported architecture ({len(extra)} in all)")
    return files
