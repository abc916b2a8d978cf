"""The model's and the optimizer's state as shards of global arrays.

Owns the step between Megatron's `sharded_state_dict` and the ledger's checkpoints. Invariant: saving and
loading changes no bit of parameters, moments and step count, under any layout that divides the model.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from gyre.errors import UserError
from gyre.ledger import checkpoints
from gyre.ledger.checkpoints import CheckpointInfo, CheckpointMeta, CheckpointReader
from gyre.ledger.chunks import ArraySpec, FileRecord, write_chunk
from gyre.training import shims
from gyre.training.model import PolicyModel
from gyre.training.optimizer import MOMENTS, Adam

with shims.quiet():
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory


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
    """Write a checkpoint below `folder`; a collective of all ranks. `nonce` must be equal on all of them.

    UserError when the file system refuses; then nothing is left behind.
    """
    optimizer.fill()
    extra = {**meta.extra, "optimizer_steps": optimizer.steps()}
    meta = replace(meta, extra=extra)
    shards = list(_all_shards(model, optimizer))
    arrays = _merged({shard.spec.key: shard.spec for shard in shards})
    path = checkpoints.temporary_path(folder, meta.step, meta.lineage, nonce)
    try:
        _write_all(path, meta, shards, arrays)
    except OSError as error:
        # A full disk or a lost mount: nothing half-written may go on filling it, and the last checkpoint
        # stands.
        shutil.rmtree(path, ignore_errors=True)
        raise UserError(
            f"{path}: the checkpoint cannot be written ({error.strerror}); make room, then `gyre resume`",
            code=1,
        ) from error
    return checkpoints.read_info(checkpoints.final_path(folder, meta.step))


def _write_all(path: Path, meta: CheckpointMeta, shards: list[Shard], arrays: dict[str, ArraySpec]) -> None:
    if dist.get_rank() == 0:
        checkpoints.create(path, arrays.values())
    dist.barrier()
    written = [_write(path, shard) for shard in shards if shard.writes]
    gathered: list[list[FileRecord]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, written)
    if dist.get_rank() == 0:
        checkpoints.finish(path, meta, list(arrays.values()), [record for part in gathered for record in part])
    dist.barrier()


def load(model: PolicyModel, optimizer: Adam | None, path: Path) -> CheckpointInfo:
    """Fill the model, and the optimizer where there is one, from a complete checkpoint of any layout."""
    info = checkpoints.read_info(path)
    reader = CheckpointReader(path)
    for shard in _model_shards(model):
        _read(reader, shard)
    if optimizer is not None:
        optimizer.fill()
        optimizer.reload()
        held = set(reader.keys())
        for shard in _optimizer_shards(model, optimizer):
            # An fp32 run's checkpoint has no separate fp32 copies; then the weights just taken over stand.
            if shard.spec.key in held or not shard.spec.key.startswith("optimizer.main."):
                _read(reader, shard)
        optimizer.set_steps(int(info.meta.extra["optimizer_steps"]))
    return info


def _all_shards(model: PolicyModel, optimizer: Adam) -> Iterator[Shard]:
    yield from _model_shards(model)
    yield from _optimizer_shards(model, optimizer)


def _model_shards(model: PolicyModel) -> Iterator[Shard]:
    for name, entry in _entries(model).items():
        yield from _shards(entry, model.get_parameter(name).detach(), prefix="")


def _optimizer_shards(model: PolicyModel, optimizer: Adam) -> Iterator[Shard]:
    entries = _entries(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, main, state, _ in optimizer.main_parameters():
        entry = entries[names[parameter]]
        for moment in MOMENTS:
            yield from _shards(entry, state[moment], prefix=f"optimizer.{moment}.")
        if main is not parameter:
            yield from _shards(entry, main.detach(), prefix="optimizer.main.")


def _entries(model: PolicyModel) -> dict[str, ShardedTensor | ShardedTensorFactory]:
    """Megatron's description of each parameter's place in the global arrays, by local name."""
    groups = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    described = model.sharded_state_dict(metadata=groups)
    return {name: described[name] for name, _ in model.named_parameters()}


def _shards(entry: ShardedTensor | ShardedTensorFactory, tensor: torch.Tensor, prefix: str) -> Iterator[Shard]:
    """The chunks of `tensor`, which has the parameter's shape: one, or gate and up for a SwiGLU weight."""
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
        yield Shard(spec, tuple(leaf.global_offset), leaf.data, writes=all(copy == 0 for copy in copies))


def _merged(own: dict[str, ArraySpec]) -> dict[str, ArraySpec]:
    """The arrays of all ranks; with pipeline stages each knows its own only."""
    gathered: list[dict[str, ArraySpec]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, own)
    return {key: spec for part in gathered for key, spec in part.items()}


def _write(path: Path, shard: Shard) -> FileRecord:
    host = shard.tensor.detach().cpu().contiguous()
    data = host.view(torch.uint16).numpy() if host.dtype is torch.bfloat16 else host.numpy()
    return write_chunk(path, shard.spec, shard.offset, data)


def _read(reader: CheckpointReader, shard: Shard) -> None:
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
