"""One trainer rank: its model, its gradient and, in the core, the optimizer.

Owns the operations that the rank program calls. Invariant: weights change only in `commit`, `load_*` and
`set_weights_flat`; during a step they stand still.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gyre.ledger.checkpoints import CheckpointInfo, CheckpointMeta
from gyre.ledger.training_stats import statistics_of
from gyre.objective.differences import units_of
from gyre.objective.surrogate import Surrogate, surrogate
from gyre.training import flat, layout, memory, pipeline, shims, state, weights
from gyre.training.architecture import read_architecture
from gyre.training.batch import DeviceBatch, MicroStepBatch, to_device
from gyre.training.folder import write_hf
from gyre.training.forward import target_logprobs
from gyre.training.gradients import FrozenGradients, Gradients
from gyre.training.model import DTYPES, build_model, with_gradient_buffers
from gyre.training.optimizer import Adam
from gyre.training.saving import Saver
from gyre.training.settings import TrainSettings

with shims.importing():
    from megatron.core import parallel_state


@dataclass(frozen=True)
class MicroStepStats:
    """Of one micro-step on this rank. A unit is a sample for gspo and a target for the other objectives.

    `difference`: recomputed minus recorded log-probability, over the `compared` targets that the present
    weights sampled: trainer against engine, apart from the clip. entropy in nats, over targets.
    """

    loss: float
    tokens: int
    targets: int
    samples: int
    units: int
    clipped: int
    ratio_mean: float
    ratio_min: float
    ratio_max: float
    entropy_mean: float
    compared: int
    difference_max: float
    difference_mean: float
    difference_sum: float
    by_length: dict[str, float]
    """The differences by sample length (`gyre.ledger.training_stats`)."""
    seconds: float = 0.0
    """of forward and backward; 0 in a pipeline, where micro-steps overlap"""

    def row(self) -> dict[str, float]:
        """As the statistics of a `done` line."""
        flat = dataclasses.asdict(self)
        by_length: dict[str, float] = flat.pop("by_length")
        return flat | by_length


@dataclass(frozen=True)
class CommitStats:
    """grad_norm: before the clip, 0.0 when there was nothing to step on. skipped: why the optimizer did not
    step, or ""."""

    grad_norm: float
    clipped: bool
    skipped: str


class Trainer:
    """`core`: with the optimizer. Starts this rank's process groups; `close` ends them. Weights are undefined
    until loaded."""

    def __init__(self, model_folder: Path, train: TrainSettings, place: layout.Layout, core: bool) -> None:
        self.architecture = read_architecture(model_folder)
        self._mixture = self.architecture.mixture() if self.architecture.experts else None
        place.check(self.architecture)
        self.model_folder = Path(model_folder)
        self.settings = train
        self.layout = place
        self.device = layout.start(place)
        self.dtype = DTYPES[train.dtype]
        self.model = build_model(self.architecture, place, self.dtype, self.device)
        self._ddp = with_gradient_buffers(self.model, place)
        self._gradients = Gradients(self._ddp)
        self._offloaded = memory.OffloadedTensors()
        self._optimizer: Adam | None = None
        self._saver: Saver | None = None
        self._taken = 0
        """micro-steps of `train_microsteps` whose gradients are in the buffers of this cell"""
        self.zero_gradients()
        if core:
            self.promote()

    def promote(self) -> None:
        """Give this rank the optimizer, with zero moments: the cell becomes the core and loads a checkpoint
        next."""
        if self._optimizer is None:
            self._optimizer = Adam(self._ddp, self.settings, self.dtype, distributed=self.layout.data > 1)

    @property
    def core(self) -> bool:
        return self._optimizer is not None

    def close(self) -> None:
        self.checkpoint_written(wait=True)
        layout.stop()

    def agree(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order; a collective."""
        if self.layout.world == 1:
            return [value]
        values: list[Any] = [None] * self.layout.world
        dist.all_gather_object(values, value)
        return values

    # Weights

    def load_hf(self) -> None:
        """Weights of the model folder. Adam's state stays."""
        weights.load_hf(self.model, self.model_folder, self.architecture, weights.Groups.of_this_rank())
        self._weights_changed()

    def load_checkpoint(self, path: Path) -> CheckpointInfo:
        """Weights, and Adam's state in the core, from a complete checkpoint of any layout; gradients are
        zeroed."""
        info = state.load(self.model, self._optimizer, path)
        self.zero_gradients()
        return info

    def save_checkpoint(self, folder: Path, meta: CheckpointMeta, nonce: str) -> CheckpointInfo:
        """Write `folder`/step-NNNNNN.zarr; a collective of the core's ranks. The `nonce` must be equal on all
        of them."""
        self.checkpoint_written(wait=True)
        return state.save(self.model, self._core(), folder, meta, nonce)

    def begin_checkpoint(self, folder: Path, meta: CheckpointMeta, nonce: str) -> bool:
        """Like `save_checkpoint`, but where memory allows a copy is written in the background, while training goes
        on: True then, and `checkpoint_written` tells when it is complete. A collective."""
        if self._saver is None:
            self._saver = Saver()
        return self._saver.save(self.model, self._core(), folder, meta, nonce)

    def checkpoint_written(self, wait: bool = False) -> CheckpointInfo | None:
        """The checkpoint that has become complete in the background, told once. Raises UserError when it could not be
        written."""
        if self._saver is None:
            return None
        return self._saver.wait() if wait else self._saver.poll()

    def weights_flat(self) -> list[torch.Tensor]:
        """A new host buffer of this rank's parameters, in the order of `flat.flatten`: one tensor, of the
        dtype of the model. Nobody changes it later, so it can be published."""
        return [flat.flatten(self.model.parameters())]

    def set_weights_flat(self, buffers: Sequence[torch.Tensor]) -> None:
        """Take over buffers of the same rank of another cell. ValueError when they do not fit."""
        if len(buffers) != 1:
            raise ValueError(f"one buffer of weights expected, not {len(buffers)}")
        flat.scatter(buffers[0], self.model.parameters())
        self._weights_changed()

    def weights_staging(self) -> list[torch.Tensor]:
        """New host buffers, not filled, of the form of `weights_flat`: where a pull can land."""
        count = sum(parameter.numel() for parameter in self.model.parameters())
        return [torch.empty(count, dtype=self.dtype)]

    def weights_digest(self) -> str:
        """Digest of `weights_flat`; equal in two cells of one layout exactly when the weights are."""
        return flat.digest(self.weights_flat())

    def hf_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors in Hugging Face's naming, on the host, in bounded memory. A collective of the ranks that share
        the model."""
        return weights.hf_tensors(self.model, self.architecture, weights.Groups.of_this_rank())

    def export_hf(self, out: Path) -> None:
        """A folder that transformers loads; rank 0 writes it. A collective like `hf_tensors`."""
        tensors = self.hf_tensors()
        if self.layout.rank == 0:
            write_hf(tensors, self.model_folder, out)
            return
        for _ in tensors:  # the other ranks' part of the collective
            pass

    # Gradients

    def zero_gradients(self) -> None:
        self._gradients.zero()
        self._taken = 0

    def train_microsteps(self, batches: Sequence[MicroStepBatch]) -> list[MicroStepStats]:
        """Add the gradients of the cell's next micro-steps; a collective of all its ranks, all with the same batches.

        The data-parallel ranks take them in turn, counted from the last `zero_gradients`, so who trains what follows
        from the order alone. Returns the statistics of every micro-step, on every rank.
        """
        first, self._taken = self._taken, self._taken + len(batches)
        turn = parallel_state.get_data_parallel_rank()
        mine = [index for index in range(len(batches)) if (first + index) % self.layout.data == turn]
        own = dict(
            zip(mine, self._train(self._together([batches[index] for index in mine], len(batches))), strict=False)
        )
        stats = {index: one for part in reversed(self.agree(own)) for index, one in part.items()}
        return [stats[index] for index in range(len(batches))]

    def _together(self, mine: list[MicroStepBatch], all_ranks: int) -> list[MicroStepBatch]:
        """As many micro-steps as the rank with the most has, where ranks compute each other's tokens."""
        if self.layout.expert == 1:
            return mine
        most = -(-all_ranks // self.layout.data)
        return [*mine, *[MicroStepBatch.empty()] * (most - len(mine))]

    def train_microstep(self, batch: MicroStepBatch) -> MicroStepStats:
        """Add the gradient of the micro-step's loss sum to this replica's own buffers, unscaled. For one pipeline
        stage."""
        return self._train([batch])[0]

    def _train(self, batches: Sequence[MicroStepBatch]) -> list[MicroStepStats]:
        """Statistics in the last stage; nothing in the others."""
        for batch in batches:
            batch.check(self.architecture.vocab, self._mixture)
        batches = [batch.padded(self.layout.rows) for batch in batches]
        if self.layout.pipeline > 1:
            return pipeline.run(self._ddp, batches, self._loss)
        stats = []
        for batch in batches:
            began = time.perf_counter()
            on_device = to_device(batch, self.device)
            loss, one = self._loss(pipeline.forward(self.model, batch, on_device), batch, on_device)
            loss.backward()  # type: ignore[no-untyped-call]
            stats.append(replace(one, seconds=time.perf_counter() - began))
        return stats

    def _loss(
        self, hidden: torch.Tensor, batch: MicroStepBatch, on_device: DeviceBatch
    ) -> tuple[torch.Tensor, MicroStepStats]:
        chunk = self.settings.targets_per_chunk
        logprobs, entropy = target_logprobs(hidden, self.model, self.architecture, on_device, chunk)
        result = surrogate(
            self.settings.objective,
            new_logprobs=logprobs,
            behaviour_logprobs=on_device.behaviour_logprobs,
            samples=on_device.samples,
            advantages=on_device.advantages,
            weights=on_device.weights,
            clip=self.settings.clip,
        )
        difference = logprobs.detach() - on_device.behaviour_logprobs
        return result.loss, _stats(self.settings.objective, batch, result, difference, entropy)

    def logprobs(self, batch: MicroStepBatch) -> torch.Tensor:
        """Log-probabilities of a micro-step's targets under the present weights, fp32 (M,) on the host. A collective
        of a replica's ranks."""
        batch.check(self.architecture.vocab, self._mixture)
        batch = batch.padded(self.layout.rows)

        def values(
            hidden: torch.Tensor, _: MicroStepBatch, on_device: DeviceBatch
        ) -> tuple[torch.Tensor, torch.Tensor]:
            chunk = self.settings.targets_per_chunk
            found, _entropy = target_logprobs(hidden, self.model, self.architecture, on_device, chunk)
            return found.sum(), found.cpu()

        with torch.no_grad():
            if self.layout.pipeline > 1:
                found = pipeline.run(self._ddp, [batch], values, backward=False)
                return pipeline.from_last_stage(found[0] if found else None)
            on_device = to_device(batch, self.device)
            return values(pipeline.forward(self.model, batch, on_device), batch, on_device)[1]

    def gradients_flat(self) -> list[torch.Tensor]:
        """The live fp32 buffers; `freeze` gives copies that can be offered."""
        return self._gradients.buffers()

    def freeze(self) -> FrozenGradients:
        """This cell's own sums as a contribution, at a micro-step boundary."""
        return self._gradients.freeze()

    def add_gradients(self, buffers: Sequence[torch.Tensor]) -> None:
        """Merge a contribution. The sum takes place at commit, in the order of these calls, whenever they
        come."""
        self._gradients.add(buffers)

    def commit(self, executions: int, learning_rate: float, targets: int | None = None) -> CommitStats:
        """The optimizer step: (own sums + contributions) / executions, finalized, clipped, stepped; gradients
        are zeroed.

        `targets`: of the whole step, by the `packed` record; with 0 the optimizer is skipped. Without the
        number it is skipped when the gradient is zero everywhere.
        """
        optimizer = self._core()
        self._gradients.total(1.0 / max(executions, 1))
        if targets == 0 or executions == 0 or (targets is None and self._no_gradient()):
            self.zero_gradients()
            return CommitStats(0.0, False, "no targets")
        norm, stepped = optimizer.step(learning_rate)
        self.zero_gradients()
        return CommitStats(norm, norm > self.settings.gradient_clip, "" if stepped else "gradient not finite")

    def gradient_difference(self, saved: Path, norm: float) -> float:
        """|g - g'| / |g|: g the clipped gradient of the step just committed, whose norm before the clip was `norm`; g'
        that of the same step from the same state in `saved`, in any layout. A collective.

        By Adam's first moments: both are b m + (1 - b) g of one m, so they differ by (1 - b)(g - g').
        """
        squares = sum(self.agree(state.moment_difference(self.model, self._core(), saved)))
        clipped = min(norm, self.settings.gradient_clip)
        return math.sqrt(squares) / ((1.0 - self.settings.adam_betas[0]) * clipped)

    # Memory

    def offload(self, weights: bool = True) -> memory.Moved:
        """Give the device memory of gradients and optimizer, and with `weights` theirs, to the engine, and wait until
        it is measured free. On CPU the same call measures and counts, and nothing moves."""
        tensors = [*self._gradients.buffers(), *(self._optimizer.tensors() if self._optimizer is not None else [])]
        kept = {parameter.untyped_storage().data_ptr() for parameter in self.model.parameters()}
        if weights:
            tensors += [parameter.data for parameter in self.model.parameters()]
        else:  # Adam's view of an fp32 weight is the weight
            tensors = [tensor for tensor in tensors if tensor.untyped_storage().data_ptr() not in kept]
        moves = self.device.type == "cuda"
        return memory.measured(
            self.device, lambda: self._offloaded.offload(tensors) if moves else memory.bytes_of(tensors), frees=moves
        )

    def onload(self) -> memory.Moved:
        """Take all of it back."""
        moves = self.device.type == "cuda"
        return memory.measured(
            self.device,
            lambda: self._offloaded.onload() if moves else memory.bytes_of(self._device_tensors()),
            frees=False,
        )

    def _device_tensors(self) -> list[torch.Tensor]:
        optimizer = self._optimizer.tensors() if self._optimizer is not None else []
        return [*(p.data for p in self.model.parameters()), *self._gradients.buffers(), *optimizer]

    def _weights_changed(self) -> None:
        if self._optimizer is not None:
            self._optimizer.reload()

    def _core(self) -> Adam:
        if self._optimizer is None:
            raise RuntimeError("this rank has no optimizer: only the core commits and saves")
        return self._optimizer

    def _no_gradient(self) -> bool:
        nonzero = torch.tensor(float(any(bool(buffer.any()) for buffer in self.gradients_flat())), device=self.device)
        dist.all_reduce(nonzero, op=dist.ReduceOp.MAX)
        return not bool(nonzero.item())


def _stats(
    objective: str,
    batch: MicroStepBatch,
    result: Surrogate,
    difference: torch.Tensor,
    entropy: torch.Tensor,
) -> MicroStepStats:
    samples = torch.from_numpy(batch.samples.astype(np.int64)).to(difference.device)
    if batch.comparable is not None:
        compared = torch.from_numpy(batch.comparable).to(difference.device)
        difference, samples = difference[compared], samples[compared]
    magnitude = difference.abs() if len(difference) else torch.zeros(1)
    return MicroStepStats(
        loss=float(result.loss.detach()),
        tokens=int((batch.segments >= 0).sum()),
        targets=len(batch.target_rows),
        samples=int((batch.weights != 0).sum()),
        units=result.units,
        clipped=result.clipped,
        ratio_mean=result.ratio_sum / result.units if result.units else 1.0,
        ratio_min=result.ratio_min,
        ratio_max=result.ratio_max,
        entropy_mean=float(entropy.sum()) / max(len(entropy), 1),
        compared=len(difference),
        difference_max=float(magnitude.max()),
        difference_mean=float(magnitude.mean()),
        difference_sum=float(difference.sum()),
        by_length=statistics_of(*units_of(objective, difference, samples, len(batch.advantages))),
    )
