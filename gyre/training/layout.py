"""The process groups of a cell's ranks.

Owns the start and end of torch.distributed in a trainer rank. Invariant: collectives of a cell's lead and its ranks
(requests, agreements) go through the hosts, so that a cell that waits keeps no GPU busy.
"""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from gyre.training import shims
from gyre.training.place import Layout

with shims.importing():
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

__all__ = ["Layout", "another_group", "start", "stop"]


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
    # Megatron asks for it under tensor parallelism: kernels then start in the order in which they were given.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    wait = datetime.timedelta(seconds=timeout)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    if layout.world == 1:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=wait)
    elif layout.listener >= 0:
        store = _listening_store(layout, wait)
        dist.init_process_group(backend, store=store, rank=layout.rank, world_size=layout.world, timeout=wait)
    else:
        dist.init_process_group(
            backend, init_method=layout.rendezvous, rank=layout.rank, world_size=layout.world, timeout=wait
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=max(1, int(timeout / 60)),
    )
    # No dropout anywhere, and weights are initialised on the CPU: the tracker that does nothing is the right
    # one.
    model_parallel_cuda_manual_seed(1, inference_rng_tracker=True)
    return device


def _listening_store(layout: Layout, wait: datetime.timedelta) -> Store:
    """The store that all ranks meet in, on a socket that is bound: torch's own choice is every address of the node."""
    host, _, port = layout.rendezvous.removeprefix("tcp://").rpartition(":")
    store = TCPStore(
        host,
        int(port),
        layout.world,
        is_master=True,
        timeout=wait,
        wait_for_workers=False,
        master_listen_fd=layout.listener,
    )
    return PrefixStore("default_pg", store)  # as torch does for those who come by the rendezvous


def another_group() -> dist.ProcessGroup | None:
    """A group of all ranks over the hosts, for a thread that runs beside the training; None for one rank."""
    return dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None


def stop() -> None:
    """Leave the process groups, so that another layout can start in this process."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
