"""Micro-steps through the stages of a pipeline: Megatron's schedule, one forward, one backward.

Owns what passes between stages: hidden states forward, their gradients back, in the lengths that each micro-step has.
Invariant: the loss is a plain sum, so a micro-step adds the same gradient in any layout; nothing is reduced, scaled or
finalized here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from gyre.training import shims
from gyre.training.batch import DeviceBatch, MicroStepBatch, to_device

with shims.importing():
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

Result = TypeVar("Result")
Loss = Callable[[torch.Tensor, MicroStepBatch, DeviceBatch], tuple[torch.Tensor, Result]]
"""Of hidden states (T, hidden) after the last norm: the loss sum, and what else is wanted of the micro-step."""


def run(
    model: DistributedDataParallel, batches: Sequence[MicroStepBatch], loss: Loss[Result], backward: bool = True
) -> list[Result]:
    """All micro-steps forward and, with `backward`, back; a collective of one replica's stages and tensor ranks.

    Returns the results of `loss` in the last stage and nothing in the others.
    """
    if not batches:
        return []
    results: list[Result] = []
    with shims.cuda_names_on_cpu():
        get_forward_backward_func()(
            forward_step_func=_step_of(loss, results),
            data_iterator=iter(batches),
            model=model,
            num_microbatches=len(batches),
            seq_length=len(batches[0].tokens),  # of the first: the stages tell each other every length
            micro_batch_size=1,
            forward_only=not backward,
        )
    return results


def forward(model: torch.nn.Module, batch: MicroStepBatch, on_device: DeviceBatch) -> torch.Tensor:
    """What this stage makes of a micro-step (see `PolicyModel.forward`)."""
    hidden: torch.Tensor = model(on_device.tokens, on_device.positions, batch.packing(), experts=on_device.experts)
    return hidden


def last_stage() -> bool:
    """Has this rank the output layer?"""
    return bool(parallel_state.is_pipeline_last_stage())


def from_last_stage(value: torch.Tensor | None) -> torch.Tensor:
    """A host tensor of the last stage, on every stage of the replica."""
    group = parallel_state.get_pipeline_model_parallel_group()
    values = [value]
    dist.broadcast_object_list(values, src=dist.get_global_rank(group, dist.get_world_size(group) - 1), group=group)
    found = values[0]
    assert found is not None
    return found


def _step_of(loss: Loss[Result], results: list[Result]) -> Callable[..., object]:
    """Megatron's forward step: (output of this stage, function from the last stage's output to its loss)."""

    def step(batches: Iterator[MicroStepBatch], model: torch.nn.Module) -> object:
        batch = next(batches)
        on_device = to_device(batch, next(model.parameters()).device)
        output = forward(model, batch, on_device)

        def loss_of(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
            value, result = loss(hidden, batch, on_device)
            results.append(result)
            return value, torch.ones((), dtype=torch.int, device=hidden.device), None

        return output, loss_of

    return step
