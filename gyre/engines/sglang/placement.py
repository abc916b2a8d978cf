"""Where a tensor of a Hugging Face folder lies in the memory of SGLang's tensor-parallel ranks. Pure.

Owns the layout of SGLang's parameters: queries, keys and values fused, gate and up fused, experts stacked, rows or
columns spread over ranks, the last ones padded. Invariant: a part is never larger than what the rank has there, in
elements of the same size; `Coverage` knows what no tensor was placed in. Layouts: QKVParallelLinear,
MergedColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding and FusedMoE of SGLang 0.5.23.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from gyre.engines.errors import EngineRefused
from gyre.engines.types import Parameter, RankMemory

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_QKV = ("q_proj", "k_proj", "v_proj")
_GATE_UP = ("gate_proj", "up_proj")
_COLUMNS = ("o_proj.weight", "down_proj.weight")
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")


class Heads(NamedTuple):
    """What the tensors' shapes do not say."""

    key_values: int
    experts: int = 0


class Part(NamedTuple):
    """A slice of a tensor, and the element of a rank's parameter at which it begins. Where the engine has made its last
    ranks' rows or columns more than there are, they are zeros, as it loads them itself."""

    rank: int
    parameter: str
    start: int
    tensor: torch.Tensor


def parts(name: str, tensor: torch.Tensor, memory: Sequence[RankMemory], heads: Heads) -> Iterator[Part]:
    """What each rank of an engine has of the tensor `name`. Raises EngineRefused when it has no such place."""
    parameter = parameter_of(name)
    for rank, there in enumerate(memory):
        found = there.parameters.get(parameter)
        if found is None:
            raise EngineRefused(f"{name}: the engine's rank {rank} has no parameter {parameter}")
        start, part = _placed(name, tensor, rank, len(memory), found, heads)
        if tensor.element_size() != found.element_bytes or start < 0 or start + part.numel() > found.elements:
            raise EngineRefused(
                f"{name}: {part.numel()} elements of {tensor.element_size()} bytes at {start} do not fit {parameter} of"
                f" the engine's rank {rank}, {found.elements} of {found.element_bytes} bytes"
            )
        yield Part(rank, parameter, start, part)


def parameter_of(name: str) -> str:
    """SGLang's name for the parameter that has the tensor."""
    if match := _EXPERT.fullmatch(name):
        return f"{match[1]}.{'w2_weight' if match[3] == 'down_proj' else 'w13_weight'}"
    for fused, modules in (("qkv_proj", _QKV), ("gate_up_proj", _GATE_UP)):
        for module in modules:
            name = name.replace(f".{module}.", f".{fused}.")
    return name


def _placed(
    name: str, tensor: torch.Tensor, rank: int, ranks: int, found: Parameter, heads: Heads
) -> tuple[int, torch.Tensor]:
    """First element and slice."""
    module = name.split(".")[-2]
    first, room = 0, found.elements
    if match := _EXPERT.fullmatch(name):
        room //= max(1, heads.experts)
        first = int(match[2]) * room
    width = tensor.numel() // max(1, tensor.shape[0])
    if name in _VOCABULARY:
        return 0, _rows(name, tensor, rank, ranks, room // width)
    if module == "q_proj":
        return 0, _rows(name, tensor, rank, ranks, tensor.shape[0] // ranks)
    if module in _QKV:
        holders = min(ranks, heads.key_values)  # with more ranks than heads, some hold the same one
        part = _rows(name, tensor, rank * holders // ranks, holders, tensor.shape[0] // holders)
        return room - (len(_QKV) - _QKV.index(module)) * part.numel(), part
    if module in _GATE_UP:
        part = _rows(name, tensor, rank, ranks, room // 2 // width)
        return first + _GATE_UP.index(module) * part.numel(), part
    if name.endswith(_COLUMNS):
        turned = _rows(name, tensor.t(), rank, ranks, room // max(1, tensor.shape[0]))
        return first, turned.t()
    return 0, tensor


def _rows(name: str, tensor: torch.Tensor, index: int, count: int, size: int) -> torch.Tensor:
    """The rows of one of `count` holders, `size` each; zeros after the tensor's last one."""
    if size * count < tensor.shape[0]:
        raise EngineRefused(f"{name}: {tensor.shape[0]} rows or columns do not fit {count} ranks of {size}")
    part = tensor[index * size : (index + 1) * size]
    if len(part) == size:
        return part
    return torch.cat([part, part.new_zeros(size - len(part), *tensor.shape[1:])])


class Coverage:
    """What has been placed of an engine's parameters."""

    def __init__(self, memory: Sequence[RankMemory]) -> None:
        self._left = [{name: found.elements for name, found in there.parameters.items()} for there in memory]

    def add(self, part: Part) -> None:
        """Count a part; each is placed once."""
        self._left[part.rank][part.parameter] -= part.tensor.numel()

    def check(self) -> None:
        """Raises EngineRefused unless every element of every parameter has been placed once."""
        for rank, parameters in enumerate(self._left):
            for name, left in parameters.items():
                if left:
                    raise EngineRefused(f"{left} elements of {name} of the engine's rank {rank} are of no tensor")
