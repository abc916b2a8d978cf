"""Weights between the model and a Hugging Face folder.

Owns reading of safetensors, and the gathering of whole tensors from a cell's ranks. Invariant: a folder that lacks a
tensor of the model, or holds one that the model does not know, is refused before any weight changes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from gyre.errors import UserError
from gyre.training import shims
from gyre.training.architecture import Architecture
from gyre.training.convert import to_hf, to_megatron
from gyre.training.names import Mapping, hf_names, is_expert, mapping, megatron_names

with shims.importing():
    from megatron.core import parallel_state

T = TypeVar("T")

_DERIVED = ("rotary_emb.inv_freq",)
"""Old folders store these; they follow from config.json."""

_LAYER = re.compile(r"(decoder\.layers\.)(\d+)((?:\.mlp\.experts\.local_experts\.)?)(\d*)(\..+)")
"""Of a stage's own numbering: layer, and expert if any."""


@dataclass(frozen=True)
class Groups:
    """The ranks that have parts of one model with this rank; None: it has all of that kind."""

    tensor: dist.ProcessGroup | None = None
    pipeline: dist.ProcessGroup | None = None
    expert: dist.ProcessGroup | None = None
    expert_tensor: dist.ProcessGroup | None = None

    @classmethod
    def of_this_rank(cls) -> Groups:
        return cls(
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_pipeline_model_parallel_group(),
            parallel_state.get_expert_model_parallel_group(),
            parallel_state.get_expert_tensor_parallel_group(),
        )

    def splitting(self, name: str) -> dist.ProcessGroup | None:
        """The ranks that have a parameter's shards."""
        return self.expert_tensor if is_expert(name) else self.tensor


def load_hf(model: torch.nn.Module, folder: Path, architecture: Architecture, groups: Groups | None = None) -> None:
    """Fill the model (this rank's shards of it) from `folder`, cast to the parameters' dtype, one parameter in memory
    at a time. UserError when the folder does not hold this architecture."""
    with ExitStack() as stack:
        files = _open(folder, architecture, stack)
        for name, parameter in whole_model_parameters(model):
            entry = _stored(mapping(name), architecture)
            tensors = [files[tensor].get_tensor(tensor) for tensor in entry.hf]
            split = (groups or Groups()).splitting(name)
            shard = to_megatron(entry, tensors, architecture, _size(split), _rank(split))
            if shard.shape != parameter.shape:
                raise UserError(f"{folder}: {entry.hf[0]} has shape {tuple(tensors[0].shape)}, unlike config.json")
            with torch.no_grad():
                parameter.copy_(shard)


def whole_model_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """This rank's parameters, with the names that they have in the whole model: Megatron counts a stage's layers, and a
    rank's experts, from 0; each layer knows its number, and those of its experts."""
    for name, parameter in model.named_parameters():
        match = _LAYER.fullmatch(name)
        if match is not None:
            prefix, number, experts, expert, rest = match.groups()
            layer: Any = model.get_submodule(prefix + number)
            if expert:
                expert = str(layer.mlp.local_expert_indices[int(expert)])
            name = f"{prefix}{int(layer.layer_number) - 1}{experts}{expert}{rest}"
        yield name, parameter


def hf_tensors(
    model: torch.nn.Module, architecture: Architecture, groups: Groups | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the Hugging Face naming, whole, as a host copy, one parameter in memory at a time.

    With groups this is a collective: every rank must run the iterator to its end, and every rank gets every tensor.
    """
    groups = groups or Groups()
    own = dict(whole_model_parameters(model))
    like = next(iter(own.values()))
    holders = [set(names) for names in _gathered(list(own), groups.expert)]
    for stage, names in enumerate(_stages(set.union(*holders), architecture, groups.pipeline)):
        for name in names:
            entry = mapping(name)
            tensors: list[torch.Tensor] = []
            if name in own and _rank(groups.pipeline) == stage:
                tensors = to_hf(entry, _gather(own[name].detach(), groups.splitting(name)), architecture)
            if is_expert(name) and _rank(groups.pipeline) == stage:
                holder = next(rank for rank, held in enumerate(holders) if name in held)
                tensors = _from(holder, tensors, len(entry.hf), like, groups.expert)
            tensors = _from(stage, tensors, len(entry.hf), like, groups.pipeline)
            for hf, tensor in zip(entry.hf, tensors, strict=True):
                yield hf, tensor.to("cpu", copy=True)


def _stages(own: set[str], architecture: Architecture, group: dist.ProcessGroup | None) -> list[list[str]]:
    """Each stage's parameters, in model order. The last stage's copy of a tied embedding is not among them."""
    order = megatron_names(architecture)
    return [[name for name in order if name in names] for names in _gathered(own, group)]


def _gathered(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """Every rank's value; a collective."""
    values = [value] * _size(group)
    if len(values) > 1:
        dist.all_gather_object(values, value, group=group)
    return values


def _size(group: dist.ProcessGroup | None) -> int:
    return dist.get_world_size(group) if group is not None else 1


def _rank(group: dist.ProcessGroup | None) -> int:
    return dist.get_rank(group) if group is not None else 0


def _from(
    holder: int, tensors: list[torch.Tensor], count: int, like: torch.Tensor, group: dist.ProcessGroup | None
) -> list[torch.Tensor]:
    """The `count` tensors of one rank, on every rank of the group; dtype and device are those of `like`."""
    if group is None or _size(group) == 1:
        return tensors
    source = dist.get_global_rank(group, holder)
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
