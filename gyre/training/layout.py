"""How the ranks of a cell share the model, and the process groups that follow from it.

Owns the start and end of torch.distributed in a trainer rank. Invariant: a layout that does not divide the
ranks or the model is refused before any process group exists.
"""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from gyre.errors import UserError
from gyre.recipe.schema import Train
from gyre.training import shims
from gyre.training.architecture import Architecture

with shims.quiet():
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed


@dataclass(frozen=True)
class Layout:
    """One rank's place among `world` = tensor * pipeline * data ranks of its cell."""

    rank: int = 0
    world: int = 1
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    rendezvous: str = ""
    """`file:///path` or `tcp://host:port`; unused with one rank."""
    local_rank: int = 0

    @classmethod
    def of(cls, train: Train, rank: int, rendezvous: str = "") -> Layout:
        """The place of one rank of a cell, by the recipe. All ranks of a cell are on one node."""
        return cls(
            rank=rank,
            world=train.ranks,
            tensor=train.tensor_parallel,
            pipeline=train.pipeline_parallel,
            data=train.data_parallel,
            rendezvous=rendezvous,
            local_rank=rank,
        )

    def check(self, architecture: Architecture) -> None:
        """UserError, naming the recipe's key, for a layout that does not divide."""
        if self.world != self.tensor * self.pipeline * self.data:
            raise UserError(
                f"train.tensor_parallel * pipeline_parallel * data_parallel = "
                f"{self.tensor * self.pipeline * self.data}, but the cell has {self.world} ranks"
            )
        if self.pipeline > 1:
            raise UserError("train.pipeline_parallel > 1: the schedule is not there yet, see issue 4; set it to 1")
        divisible = {
            "attention heads": architecture.heads,
            "key-value heads": architecture.kv_heads,
            "intermediate size": architecture.ffn,
        }
        for what, number in divisible.items():
            if number % self.tensor:
                raise UserError(f"train.tensor_parallel = {self.tensor} does not divide the model's {number} {what}")
        if self.world > 1 and not self.rendezvous:
            raise UserError(f"a cell of {self.world} ranks needs a rendezvous (file:// or tcp://)")


def start(layout: Layout, timeout: float = 600.0) -> torch.device:
    """Join the process groups; returns this rank's device. Collectives fail after `timeout` seconds."""
    if dist.is_initialized():
        raise RuntimeError("this process already belongs to a layout; call stop() first")
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", layout.local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if layout.world == 1 or layout.rendezvous.startswith(("file://", "tcp://127.0.0.1:")):
        # All ranks are on this machine: gloo must not listen on the machine's outer address.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    wait = datetime.timedelta(seconds=timeout)
    backend = "nccl" if cuda else "gloo"
    if layout.world == 1:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=wait)
    else:
        dist.init_process_group(
            backend, init_method=layout.rendezvous, rank=layout.rank, world_size=layout.world, timeout=wait
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=max(1, int(timeout / 60)),
    )
    # No dropout anywhere, and weights are initialised on the CPU: the tracker that does nothing is the right
    # one.
    model_parallel_cuda_manual_seed(1, inference_rng_tracker=True)
    return device


def stop() -> None:
    """Leave the process groups, so that another layout can start in this process."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
