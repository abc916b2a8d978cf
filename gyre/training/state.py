"""The model's and the optimizer's state as shards of global arrays.

Owns the step between Megatron's `sharded_state_dict` and the ledger's checkpoints. Invariant: saving and
loading changes no bit of parameters, moments and step count, under any layout that divides the model.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from gyre.ledger import checkpoints
from gyre.ledger.checkpoints import CheckpointInfo, CheckpointMeta, CheckpointReader
from gyre.ledger.chunks import ArraySpec, FileRecord, write_chunk
from gyre.ledger.files import errno_of, write_error
from gyre.training import shims
from gyre.training.model import PolicyModel
from gyre.training.optimizer import MOMENTS, Adam, Held

with shims.importing():
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory


T = TypeVar("T")
WRITERS = 4
"""Chunks that a rank writes at a time; so many host copies exist."""
PREFIXES = tuple(f"optimizer.{moment}." for moment in MOMENTS)
MAIN = "optimizer.main."


@dataclass(frozen=True)
class Shard:
    """One chunk of a global array, and the live tensor (a view) that holds it on this rank."""

    spec: ArraySpec
    offset: tuple[int, ...]
    tensor: torch.Tensor
    writes: bool
    """This rank writes the chunk (others hold copies)."""

    def region(self) -> tuple[slice, ...]:
        return tuple(slice(o, o + c) for o, c in zip(self.offset, self.spec.chunk, strict=True))


def save(model: PolicyModel, optimizer: Adam, folder: Path, meta: CheckpointMeta, nonce: str) -> CheckpointInfo:
    """Write a checkpoint below `folder`; a collective of all ranks, each of which writes its own chunks. `nonce` must
    be equal on all of them.

    LedgerWriteError, on every rank, when the file system refuses one of them; then nothing is left behind.
    """
    shards, meta = collect(model, optimizer, meta)
    return write(shards, arrays_of(shards), folder, meta, nonce)


def collect(model: PolicyModel, optimizer: Adam, meta: CheckpointMeta) -> tuple[list[Shard], CheckpointMeta]:
    """All shards that this rank knows, over live tensors; a collective. The meta gets Adam's count of steps."""
    optimizer.fill()
    meta = replace(meta, extra={**meta.extra, "optimizer_steps": optimizer.steps()})
    return [*_model_shards(model), *_optimizer_shards(model, optimizer)], meta


def copied(shards: list[Shard]) -> list[Shard]:
    """What this rank writes, on the host and out of the reach of training."""
    return [replace(shard, tensor=shard.tensor.to("cpu", copy=True)) for shard in shards if shard.writes]


def arrays_of(shards: list[Shard]) -> dict[str, ArraySpec]:
    """The arrays of all ranks; with pipeline stages each knows its own only. A collective."""
    gathered: list[dict[str, ArraySpec]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, {shard.spec.key: shard.spec for shard in shards})
    return {key: spec for part in gathered for key, spec in part.items()}


def write(
    shards: list[Shard],
    arrays: dict[str, ArraySpec],
    folder: Path,
    meta: CheckpointMeta,
    nonce: str,
    group: dist.ProcessGroup | None = None,
) -> CheckpointInfo:
    """The writing part of `save`; a collective over `group`, which is all ranks."""
    path = checkpoints.temporary_path(folder, meta.step, meta.lineage, nonce)
    first = dist.get_rank() == 0
    try:
        _together(lambda: checkpoints.create(path, arrays.values()) if first else None, group)
        written = _together(lambda: _write_all(path, [shard for shard in shards if shard.writes]), group)
        records = [record for part in written for record in part]
        _together(lambda: checkpoints.finish(path, meta, list(arrays.values()), records) if first else None, group)
    except OSError as error:
        # A full disk or a lost mount: nothing half-written may go on filling it, and the last checkpoint
        # stands.
        if first:
            shutil.rmtree(path, ignore_errors=True)
        raise write_error(path, error) from error
    return checkpoints.read_info(checkpoints.final_path(folder, meta.step))


def _write_all(path: Path, shards: list[Shard]) -> list[FileRecord]:
    """Several at a time: a disk is idle while one file's digest is computed, and the processor while it is synced."""
    with ThreadPoolExecutor(WRITERS, "chunks") as pool:
        return list(pool.map(lambda shard: _write(path, shard), shards))


def _together(work: Callable[[], T], group: dist.ProcessGroup | None) -> list[T]:
    """Do `work` on every rank; all its values, or on every rank the OSError that any of them met."""
    value, problem = None, None
    try:
        value = work()
    except OSError as error:
        problem = (errno_of(error), error.strerror or str(error))
    gathered: list[Any] = [(value, problem)] * dist.get_world_size()
    if len(gathered) > 1:
        dist.all_gather_object(gathered, (value, problem), group=group)
    for _, found in gathered:
        if found is not None:
            raise OSError(*found)
    return [one for one, _ in gathered]


def load(model: PolicyModel, optimizer: Adam | None, path: Path) -> CheckpointInfo:
    """Fill the model, and the optimizer where there is one, from a complete checkpoint of any layout."""
    info = checkpoints.read_info(path)
    reader = CheckpointReader(path)
    entries = _entries(model)
    for name, parameter in model.named_parameters():
        for shard in _shards(entries[name], parameter.detach(), "", writes=False):
            fill(reader, shard)
    if optimizer is not None:
        optimizer.fill()
        optimizer.reload()
        names = {parameter: name for name, parameter in model.named_parameters()}
        arrays = set(reader.keys())
        for held in optimizer.held():
            for prefix, tensor in _optimizer_tensors(held):
                # An fp32 run's checkpoint has no separate fp32 copies; then the weights just taken over stand.
                if prefix != MAIN or f"{MAIN}{_key(entries[names[held.parameter]])}" in arrays:
                    _read_held(reader, entries[names[held.parameter]], held, tensor, prefix)
        optimizer.set_steps(int(info.meta.extra["optimizer_steps"]))
    return info


def _model_shards(model: PolicyModel) -> Iterator[Shard]:
    """Every rank that has a copy has all of it: they write in turn."""
    entries = _entries(model)
    for index, (name, parameter) in enumerate(model.named_parameters()):
        group = _copies(parameter)
        writes = index % dist.get_world_size(group) == dist.get_rank(group)
        yield from _shards(entries[name], parameter.detach(), "", writes)


def _optimizer_shards(model: PolicyModel, optimizer: Adam) -> Iterator[Shard]:
    """Moments, and fp32 copies of bf16 parameters. With the distributed optimizer most parameters lie wholly in one
    data-parallel rank, which writes them; those across a border are put together in the first rank that has a part.
    """
    mine = {held.parameter: held for held in optimizer.held()}
    parts = {name: _part(mine.get(parameter)) for name, parameter in model.named_parameters()}
    everyones: dict[dist.ProcessGroup, list[dict[str, tuple[int, int] | None]]] = {}
    for group in dict.fromkeys(map(_copies, model.parameters())):
        everyones[group] = [parts] * dist.get_world_size(group)
        if len(everyones[group]) > 1:
            dist.all_gather_object(everyones[group], parts, group=group)
    entries = _entries(model)
    for name, parameter in model.named_parameters():
        group = _copies(parameter)
        me, theirs = dist.get_rank(group), [held[name] for held in everyones[group]]
        owners = [rank for rank, part in enumerate(theirs) if part is not None]
        whole = theirs[owners[0]] == (0, parameter.numel())
        held = mine.get(parameter)
        for prefix in (*PREFIXES, *([MAIN] if parameter.dtype is not torch.float32 else [])):
            tensor = dict(_optimizer_tensors(held))[prefix] if held is not None else None
            if not whole:
                tensor = _assembled(parameter, held, tensor, dist.get_global_rank(group, owners[0]), group)
            if tensor is None or me != owners[0]:
                tensor = torch.empty(parameter.shape, device="meta")  # of another rank's chunks only the place is known
            yield from _shards(entries[name], tensor.view(parameter.shape), prefix, writes=me == owners[0])


def moment_difference(model: PolicyModel, optimizer: Adam, path: Path) -> float:
    """|m - m'|^2 over this rank's own chunks: Adam's first moment here and in a checkpoint of any layout. A
    collective."""
    reader = CheckpointReader(path)
    total = 0.0
    for shard in _optimizer_shards(model, optimizer):
        if shard.writes and shard.spec.key.startswith(PREFIXES[0]):
            other = replace(shard, tensor=torch.empty_like(shard.tensor))
            fill(reader, other)
            total += float((shard.tensor.double() - other.tensor.double()).square().sum())
    return total


def _copies(parameter: torch.nn.Parameter) -> dist.ProcessGroup:
    """The data-parallel ranks of a parameter. Those of experts that are spread over ranks are fewer."""
    if getattr(parameter, "allreduce", True):
        return parallel_state.get_data_parallel_group()
    return parallel_state.get_expert_data_parallel_group()


def _part(held: Held | None) -> tuple[int, int] | None:
    return (held.first, held.last) if held is not None else None


def _optimizer_tensors(held: Held) -> Iterator[tuple[str, torch.Tensor]]:
    """What a checkpoint keeps of a parameter's Adam, each of `main`'s shape."""
    for moment, prefix in zip(MOMENTS, PREFIXES, strict=True):
        yield prefix, held.state[moment].detach()
    if held.copied:
        yield MAIN, held.main.detach()


def _assembled(
    parameter: torch.Tensor, held: Held | None, part: torch.Tensor | None, writer: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """fp32 of the parameter's shape, whole in rank `writer`. Summed as integers, disjoint parts keep their bits."""
    whole = torch.zeros(parameter.numel(), dtype=torch.int32, device=parameter.device)
    if held is not None and part is not None:
        whole[held.first : held.last] = part.view(torch.int32)
    dist.reduce(whole, dst=writer, group=group)
    return whole.view(torch.float32)


def _read_held(
    reader: CheckpointReader, entry: ShardedTensor | ShardedTensorFactory, held: Held, tensor: torch.Tensor, prefix: str
) -> None:
    """Fill this rank's part of a parameter's moment."""
    shape = held.parameter.shape
    whole = tensor.view(shape) if held.whole else torch.empty(shape, dtype=tensor.dtype)
    for shard in _shards(entry, whole, prefix, writes=False):
        fill(reader, shard)
    if not held.whole:
        tensor.copy_(whole.view(-1)[held.first : held.last])


def _key(entry: ShardedTensor | ShardedTensorFactory) -> str:
    return str(entry.key)


def _entries(model: PolicyModel) -> dict[str, ShardedTensor | ShardedTensorFactory]:
    """Megatron's description of each parameter's place in the global arrays, by local name."""
    groups = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    described = model.sharded_state_dict(metadata=groups)
    return {name: described[name] for name, _ in model.named_parameters()}


def _shards(
    entry: ShardedTensor | ShardedTensorFactory, tensor: torch.Tensor, prefix: str, writes: bool
) -> Iterator[Shard]:
    """The chunks of `tensor`, which has the parameter's shape: one, or gate and up for a SwiGLU weight.

    `writes`: this rank is the one of its data-parallel ranks that writes them, unless other ranks do.
    """
    if isinstance(entry, ShardedTensorFactory):
        built = replace(entry, data=tensor).build()
        leaves = list(nested_values(built)) if isinstance(built, dict) else list(built)
    else:
        leaves = [replace(entry, data=tensor, dtype=tensor.dtype)]
    for leaf in leaves:
        stacked = leaf.prepend_axis_num
        spec = ArraySpec(
            key=prefix + leaf.key,
            shape=tuple(leaf.global_shape),
            chunk=(1,) * stacked + tuple(leaf.local_shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
        )
        copies = leaf.replica_id if isinstance(leaf.replica_id, tuple) else (leaf.replica_id,)
        original = all(copy == 0 for copy in copies[:-1])  # the last counts data-parallel ranks
        yield Shard(spec, tuple(leaf.global_offset), leaf.data, writes=writes and original)


def _write(path: Path, shard: Shard) -> FileRecord:
    host = shard.tensor.detach().cpu().contiguous()
    data = host.view(torch.uint16).numpy() if host.dtype is torch.bfloat16 else host.numpy()
    return write_chunk(path, shard.spec, shard.offset, data)


def fill(reader: CheckpointReader, shard: Shard) -> None:
    """Fill a shard. The vocabulary's padding differs between layouts: rows beyond the array's end are
    zero."""
    data = reader.read(shard.spec.key, shard.region())
    if reader.dtype(shard.spec.key) == "bfloat16":
        tensor = torch.from_numpy(data.view(np.uint16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(data)
    if tensor.numel() != prod(shard.spec.chunk):
        whole = torch.zeros(shard.spec.chunk, dtype=tensor.dtype)
        whole[tuple(slice(0, size) for size in tensor.shape)] = tensor
        tensor = whole
    with torch.no_grad():
        shard.tensor.copy_(tensor.view(shard.tensor.shape))
