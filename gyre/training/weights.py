"""Weights between the model and a Hugging Face folder.

Owns reading of safetensors, and the gathering of whole tensors from a cell's ranks. Invariant: a folder that lacks a
tensor of the model, or holds one that the model does not know, is refused before any weight changes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gyre.errors import UserError
from gyre.training.architecture import Architecture
from gyre.training.convert import to_hf, to_megatron
from gyre.training.names import Mapping, hf_names, mapping

_DERIVED = ("rotary_emb.inv_freq",)
"""Old folders store these; they follow from config.json."""

_LAYER = re.compile(r"(decoder\.layers\.)(\d+)(\..+)")


def load_hf(model: torch.nn.Module, folder: Path, architecture: Architecture, parallel: int = 1, rank: int = 0) -> None:
    """Fill the model (one tensor-parallel rank's shard of one pipeline stage) from `folder`, cast to the parameters'
    dtype, one parameter in memory at a time. UserError when the folder does not hold this architecture."""
    with ExitStack() as stack:
        files = _open(folder, architecture, stack)
        for name, parameter in whole_model_parameters(model):
            entry = _stored(mapping(name), architecture)
            tensors = [files[tensor].get_tensor(tensor) for tensor in entry.hf]
            shard = to_megatron(entry, tensors, architecture, parallel, rank)
            if shard.shape != parameter.shape:
                raise UserError(f"{folder}: {entry.hf[0]} has shape {tuple(tensors[0].shape)}, unlike config.json")
            with torch.no_grad():
                parameter.copy_(shard)


def whole_model_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters of this rank's pipeline stage, with the names that they have in the whole model: Megatron counts
    a stage's layers from 0, and each layer knows its number."""
    for name, parameter in model.named_parameters():
        match = _LAYER.fullmatch(name)
        if match is not None:
            layer = model.get_submodule(match[1] + match[2])
            name = f"{match[1]}{int(layer.layer_number) - 1}{match[3]}"  # type: ignore[arg-type]
        yield name, parameter


def hf_tensors(
    model: torch.nn.Module,
    architecture: Architecture,
    tensor_group: dist.ProcessGroup | None = None,
    pipeline_group: dist.ProcessGroup | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the Hugging Face naming, whole, as a host copy, one parameter in memory at a time.

    With groups this is a collective: every rank must run the iterator to its end, and every rank gets every tensor.
    """
    own = dict(whole_model_parameters(model))
    for stage, names in enumerate(_stages(list(own), architecture, pipeline_group)):
        for name in names:
            entry = mapping(name)
            mine = name in own and (pipeline_group is None or dist.get_rank(pipeline_group) == stage)
            tensors = to_hf(entry, _gather(own[name].detach(), tensor_group), architecture) if mine else []
            if pipeline_group is not None and dist.get_world_size(pipeline_group) > 1:
                tensors = _from_stage(tensors, stage, len(entry.hf), next(iter(own.values())), pipeline_group)
            for hf, tensor in zip(entry.hf, tensors, strict=True):
                yield hf, tensor.to("cpu", copy=True)


def _stages(own: list[str], architecture: Architecture, group: dist.ProcessGroup | None) -> list[list[str]]:
    """Each stage's parameters. The last stage's copy of a tied embedding is not among them."""
    stages = [own]
    if group is not None and dist.get_world_size(group) > 1:
        stages = [[] for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(stages, own, group=group)
    return [[name for name in names if not (architecture.tied and name == "output_layer.weight")] for names in stages]


def _from_stage(
    tensors: list[torch.Tensor], stage: int, count: int, like: torch.Tensor, group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """The tensors of one stage, on every stage; dtype and device are those of `like`."""
    source = dist.get_global_rank(group, stage)
    shapes: list[Any] = [tuple(tensor.shape) for tensor in tensors] or [None] * count
    dist.broadcast_object_list(shapes, src=source, group=group)
    given = tensors or [torch.empty(shape, dtype=like.dtype, device=like.device) for shape in shapes]
    given = [tensor.contiguous() for tensor in given]
    for tensor in given:
        dist.broadcast(tensor, src=source, group=group)
    return given


def _stored(entry: Mapping, architecture: Architecture) -> Mapping:
    """The last pipeline stage of a tied model holds a copy of the embedding."""
    if architecture.tied and entry.hf == ("lm_head.weight",):
        return Mapping(("model.embed_tokens.weight",), entry.kind)
    return entry


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
