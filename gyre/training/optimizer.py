"""Megatron's Adam, and access to its state.

Owns the only optimizer of a run (the core's). Invariant: a step changes weights only when the whole gradient
is finite, on all ranks or on none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from gyre.training import shims
from gyre.training.settings import TrainSettings

with shims.quiet():
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

MOMENTS = ("exp_avg", "exp_avg_sq")


class Adam:
    """AdamW on fp32 parameters (bf16 ones have fp32 copies), clipped by global norm."""

    def __init__(self, model: DistributedDataParallel, settings: TrainSettings, dtype: torch.dtype) -> None:
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
            use_distributed_optimizer=False,
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
        finalize_model_grads([self._model])
        for group in self._megatron.param_groups:
            group["lr"] = learning_rate
            group["weight_decay"] = self._weight_decay * group["wd_mult"]  # Megatron gives norms a factor of zero
        if not self._finite():
            return float("nan"), False
        with shims.cuda_names_on_cpu():
            success, norm, _ = self._megatron.step()
            # The fp32 optimizer leaves `grad` an alias of `main_grad`; the next backward pass would then
            # count twice.
            self._megatron.zero_grad(set_to_none=True)
        return float(norm), bool(success)

    def reload(self) -> None:
        """Take over weights that were just written into the model (the fp32 copies of bf16 parameters)."""
        self._megatron.reload_model_params()

    def main_parameters(
        self,
    ) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor, dict[str, Any], dict[str, Any]]]:
        """For each parameter: itself, the fp32 tensor that Adam steps, Adam's state of it, its parameter
        group."""
        for optimizer in self._used():
            inner = optimizer.optimizer
            copies = _copies(optimizer)
            for group in inner.param_groups:
                for main in group["params"]:
                    yield copies.get(main, main), main, inner.state[main], group

    def steps(self) -> int:
        """Steps that Adam has counted."""
        for _, _, state, group in self.main_parameters():
            return int(state.get("step", group.get("step", 0)))
        return 0

    def set_steps(self, steps: int) -> None:
        """Restore the count; each parameter gets a counter of its own (a shared one would be counted up many
        times)."""
        for _, _, state, group in self.main_parameters():
            if not self._torch_adam:
                group["step"] = steps
            else:
                state["step"] = torch.tensor(float(steps), dtype=torch.float32)

    def fill(self) -> None:
        """Create the state of a fresh Adam where it has not stepped yet."""
        fresh = self.steps() == 0
        for _, main, state, _ in self.main_parameters():
            for moment in MOMENTS:
                if moment not in state:
                    state[moment] = torch.zeros_like(main, memory_format=torch.preserve_format)
        if fresh:
            self.set_steps(0)

    def tensors(self) -> list[torch.Tensor]:
        """Every device tensor that belongs to the optimizer alone: moments, and fp32 copies."""
        out: list[torch.Tensor] = []
        for parameter, main, state, _ in self.main_parameters():
            out.extend(state[moment] for moment in MOMENTS if moment in state)
            if main is not parameter:
                out.append(main)
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
        dist.all_reduce(bad, group=parallel_state.get_model_parallel_group())
        return not bool(bad.item())


def _copies(optimizer: Any) -> dict[torch.Tensor, torch.nn.Parameter]:
    """fp32 copy -> the bf16 parameter of the model that it stands for; empty for an fp32 optimizer."""
    pairs = zip(
        getattr(optimizer, "fp32_from_float16_groups", []),
        getattr(optimizer, "float16_groups", []),
        strict=True,
    )
    return {main: model for mains, models in pairs for main, model in zip(mains, models, strict=True)}
