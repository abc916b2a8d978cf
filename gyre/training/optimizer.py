"""Megatron's Adam, and access to its state.

Owns the only optimizer of a run (the core's). Invariant: a step changes weights only when the whole gradient
is finite, on all ranks or on none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from gyre.training import shims
from gyre.training.settings import TrainSettings

with shims.importing():
    from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Held:
    """One parameter's part in Adam on this rank: elements [first, last) of the flattened parameter.

    main: the fp32 tensor that Adam steps, the parameter itself, a view of it or a copy; with the distributed optimizer
    it is flat. state: Adam's, of `main`'s shape. group: Adam's parameter group.
    """

    parameter: torch.nn.Parameter
    main: torch.Tensor
    state: dict[str, Any]
    group: dict[str, Any]
    first: int
    last: int

    @property
    def copied(self) -> bool:
        return self.parameter.dtype is not torch.float32

    @property
    def whole(self) -> bool:
        return self.last - self.first == self.parameter.numel()


class Adam:
    """AdamW on fp32 parameters (bf16 ones have fp32 copies), clipped by global norm.

    `distributed`: each data-parallel rank holds and steps its part of every buffer (Megatron's DistributedOptimizer).
    """

    def __init__(
        self, model: DistributedDataParallel, settings: TrainSettings, dtype: torch.dtype, distributed: bool = False
    ) -> None:
        config = OptimizerConfig(
            optimizer="adam",
            lr=0.0,
            min_lr=0.0,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.adam_betas[0],
            adam_beta2=settings.adam_betas[1],
            adam_eps=settings.adam_eps,
            clip_grad=settings.gradient_clip,
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=distributed,
        )
        self._model = model
        self._weight_decay = settings.weight_decay
        with shims.cuda_names_on_cpu(), shims.quiet():
            self._megatron = get_megatron_optimizer(config, [model], use_gloo_process_groups=False)
        # torch's AdamW counts steps in each parameter's state; those of Transformer Engine and Apex in the
        # group.
        self._torch_adam = all(isinstance(inner, torch.optim.Adam) for inner in self._inner())

    def step(self, learning_rate: float) -> tuple[float, bool]:
        """Finalize (sums over data- and tensor-parallel ranks), clip, step. Returns (norm before the clip,
        stepped).

        A gradient that is not finite changes nothing: (norm, False).
        """
        with shims.quiet():
            finalize_model_grads([self._model])
        for group in self._megatron.param_groups:
            group["lr"] = learning_rate
            group["weight_decay"] = self._weight_decay * group["wd_mult"]  # Megatron gives norms a factor of zero
        if not self._finite():
            return float("nan"), False
        with shims.cuda_names_on_cpu(), shims.quiet():
            success, norm, _ = self._megatron.step()
            # The fp32 optimizer leaves `grad` an alias of `main_grad`; the next backward pass would then
            # count twice.
            self._megatron.zero_grad(set_to_none=True)
        return float(norm), bool(success)

    def reload(self) -> None:
        """Take over weights that were just written into the model (the fp32 copies of bf16 parameters)."""
        self._megatron.reload_model_params()

    def held(self) -> Iterator[Held]:
        """What this rank steps, parameter by parameter."""
        for optimizer in self._used():
            inner = optimizer.optimizer
            parameters = _parameters(optimizer)
            ranges = getattr(optimizer, "_get_model_param_range_map", None)
            for group in inner.param_groups:
                for main in group["params"]:
                    parameter = parameters.get(main, main)
                    part = ranges(parameter)["param"] if ranges is not None else None
                    first, last = (part.start, part.end) if part is not None else (0, parameter.numel())
                    yield Held(parameter, main, inner.state[main], group, first, last)

    def steps(self) -> int:
        """Steps that Adam has counted."""
        for held in self.held():
            return int(held.state.get("step", held.group.get("step", 0)))
        return 0

    def set_steps(self, steps: int) -> None:
        """Restore the count; each parameter gets a counter of its own (a shared one would be counted up many
        times)."""
        for held in self.held():
            if not self._torch_adam:
                held.group["step"] = steps
            else:
                held.state["step"] = torch.tensor(float(steps), dtype=torch.float32)

    def fill(self) -> None:
        """Create the state of a fresh Adam where it has not stepped yet."""
        fresh = self.steps() == 0
        for held in self.held():
            for moment in MOMENTS:
                if moment not in held.state:
                    held.state[moment] = torch.zeros_like(held.main, memory_format=torch.preserve_format)
        if fresh:
            self.set_steps(0)

    def tensors(self) -> list[torch.Tensor]:
        """Every device tensor that belongs to the optimizer alone: moments, and fp32 copies."""
        out: list[torch.Tensor] = []
        for held in self.held():
            out.extend(held.state[moment] for moment in MOMENTS if moment in held.state)
            if held.copied:
                out.append(held.main)
        return out

    def _used(self) -> list[Any]:
        """Megatron's optimizers that hold parameters on this rank."""
        chained = getattr(self._megatron, "chained_optimizers", [self._megatron])
        return [optimizer for optimizer in chained if not getattr(optimizer, "is_stub_optimizer", False)]

    def _inner(self) -> list[torch.optim.Optimizer]:
        return [optimizer.optimizer for optimizer in self._used()]

    def _finite(self) -> bool:
        buffers = [*self._model.buffers, *self._model.expert_parallel_buffers]
        bad = torch.zeros(1, device=buffers[0].grad_data.device)
        for buffer in buffers:
            bad += (~torch.isfinite(buffer.grad_data.sum())).float()
        dist.all_reduce(bad)  # of all ranks: with the distributed optimizer each has a part of the sum
        return not bool(bad.item())


def _parameters(optimizer: Any) -> dict[torch.Tensor, torch.nn.Parameter]:
    """What Adam steps -> the parameter of the model behind it, where they are not the same tensor."""
    pairs = [("fp32_from_float16_groups", "float16_groups")]
    if hasattr(optimizer, "shard_fp32_groups"):
        pairs = [("shard_fp32_groups", "model_fp32_groups"), ("shard_fp32_from_float16_groups", "model_float16_groups")]
    return {
        main: parameter
        for mains_of, parameters_of in pairs
        for mains, parameters in zip(
            getattr(optimizer, mains_of, []), getattr(optimizer, parameters_of, []), strict=True
        )
        for main, parameter in zip(mains, parameters, strict=True)
    }
