"""The policy: a Megatron GPT model built from an `Architecture`, with packed segments and a separate output
layer.

Owns Megatron's configuration. Invariant: `forward` gives hidden states only; logits exist for the rows that
are asked for and never for the whole sequence.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F

from gyre.training import shims
from gyre.training.architecture import Architecture
from gyre.training.attention import Packing, PositionRotary, SegmentAttention
from gyre.training.names import mapping
from gyre.training.place import Layout
from gyre.training.routing_replay import Choices

with shims.importing():
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class PolicyModel(GPTModel):  # type: ignore[misc]
    """GPTModel that takes positions and a packing, and leaves the output layer to its caller."""

    def __init__(self, architecture: Architecture, layout: Layout, dtype: torch.dtype) -> None:
        super().__init__(
            config=transformer_config(architecture, layout, dtype),
            transformer_layer_spec=stage_spec(architecture, layout),
            vocab_size=architecture.padded_vocab(layout.tensor),
            max_sequence_length=architecture.max_positions,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            parallel_output=True,
            share_embeddings_and_output_weights=architecture.tied,
            position_embedding_type="rope",
        )
        self.rotary_pos_emb = PositionRotary(architecture.head_dim, architecture.rope_theta)
        _drop_biases(self, architecture)
        self.choices = _choices(self, architecture, layout) if architecture.experts else None
        if self.post_process:
            # It takes the rows of targets, gathered before from all parts of the sequence.
            self.output_layer.sequence_parallel = False
            self.output_layer.allreduce_dgrad = layout.tensor > 1

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        packing: Packing | None = None,
        attention_mask: torch.Tensor | None = None,
        experts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """tokens, positions: int64 (T,) -> hidden states after the last norm, (T, hidden). experts: int (T, layers,
        chosen), the choice of the routers, negative where it is theirs.

        In a pipeline every stage is given both; the earlier ones give (T, 1, hidden), which the schedule takes on; with
        sequence parallelism this rank's part of the rows.
        Either `packing`, or a bool `attention_mask` (1, 1, T, T), True where masked, or plain
        causal.
        """
        embedded = self.embedding(input_ids=tokens[None], position_ids=positions[None]) if self.pre_process else None
        with nullcontext() if self.choices is None else self.choices.replayed(experts):
            hidden = self.decoder(
                hidden_states=embedded,
                attention_mask=attention_mask,
                rotary_pos_emb=self.rotary_pos_emb(positions),
                packed_seq_params=packing,
            )
        if not self.post_process:
            return hidden
        if self.config.sequence_parallel:
            group = parallel_state.get_tensor_model_parallel_group()
            # The loss is the same on every rank, and so is its gradient: each takes its own part of it.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=group)
        return hidden[:, 0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: (M, hidden) -> this tensor-parallel rank's columns, (M, padded vocab / tensor parallel)."""
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        columns, _ = self.output_layer(hidden[:, None], weight=weight)
        return columns[:, 0]


def build_model(architecture: Architecture, layout: Layout, dtype: torch.dtype, device: torch.device) -> PolicyModel:
    """The model of this rank, its weights not yet meaningful (`weights.load_hf` or a checkpoint fills
    them)."""
    with shims.quiet(), shims.cuda_names_on_cpu():
        model = PolicyModel(architecture, layout, dtype).to(device=device, dtype=dtype)
    for name, parameter in model.named_parameters():
        kind = mapping(name).kind
        if kind != "replicated" and not hasattr(parameter, "tensor_model_parallel"):
            # Megatron sets this while it initialises weights, which we skip; the gradient norm depends on it.
            set_tensor_model_parallel_attributes(parameter, True, 1 if kind == "columns" else 0, 1)
    model.train()
    return model


def with_gradient_buffers(model: PolicyModel, layout: Layout) -> DistributedDataParallel:
    """Wrap in Megatron's DDP for its flat fp32 `grad_data`: no scaling, no overlap, plain sums.

    With data parallelism the buffers are those of the distributed optimizer: padded, and reduced by scattering.
    """
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,
        use_distributed_optimizer=layout.data > 1,
        average_in_collective=False,
    )
    return DistributedDataParallel(config=model.config, ddp_config=config, module=model)


class Norm(torch.nn.RMSNorm):
    """RMSNorm whose weight says that its gradient is a part on each tensor-parallel rank (Megatron's own norms refuse
    sequence parallelism where CUDA's kernels are not installed)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def stage_spec(architecture: Architecture, layout: Layout) -> TransformerBlockSubmodules:
    """The layers of this rank's stage."""
    layers = architecture.layers // layout.pipeline
    return TransformerBlockSubmodules(layer_specs=[layer_spec(architecture)] * layers, layer_norm=Norm)


def layer_spec(architecture: Architecture) -> ModuleSpec:
    """Megatron's local layer with our core attention and norms."""
    shims.router_without_transformer_engine()
    shims.token_dispatch_without_streams()
    spec = get_gpt_layer_local_spec(
        num_experts=architecture.experts or None,
        moe_grouped_gemm=False,
        qk_layernorm=architecture.qk_norm,
        normalization="RMSNorm",
    )
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    attention.core_attention = SegmentAttention
    layer.input_layernorm = layer.pre_mlp_layernorm = Norm
    if architecture.qk_norm:
        attention.q_layernorm = attention.k_layernorm = Norm
    return spec


def transformer_config(architecture: Architecture, layout: Layout, dtype: torch.dtype) -> TransformerConfig:
    """Megatron's configuration; every fusion that needs CUDA or a compiler is off, on CPU and GPU alike."""
    return TransformerConfig(
        num_layers=architecture.layers,
        hidden_size=architecture.hidden,
        ffn_hidden_size=architecture.ffn,
        num_attention_heads=architecture.heads,
        num_query_groups=architecture.kv_heads,
        kv_channels=architecture.head_dim,
        layernorm_epsilon=architecture.norm_eps,
        qk_layernorm=architecture.qk_norm,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        sequence_parallel=layout.sequence,
        variable_seq_lengths=layout.pipeline > 1,
        moe_token_dispatcher_type="alltoall",  # the others go with one length for all micro-steps
        normalization="RMSNorm",
        activation_func=F.silu,
        gated_linear_unit=True,
        add_bias_linear=architecture.output_bias or architecture.mlp_bias,
        add_qkv_bias=architecture.qkv_bias,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        calculate_per_token_loss=True,  # DDP then sums over data-parallel ranks and does not divide
        use_cpu_initialization=True,
        perform_initialization=False,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **_experts(architecture),
    )


def _experts(architecture: Architecture) -> dict[str, Any]:
    """Local experts that drop no token; no auxiliary loss, and no expert bias that training would update."""
    if not architecture.experts:
        return {}
    return {
        "num_moe_experts": architecture.experts,
        "moe_router_topk": architecture.experts_per_token,
        "moe_ffn_hidden_size": architecture.expert_ffn,
        # A softmax over the chosen experts' logits is the softmax over all, scaled to a sum of 1.
        "moe_router_pre_softmax": not architecture.normalise_experts,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_enable_expert_bias": False,
        "moe_expert_capacity_factor": None,
        "moe_grouped_gemm": False,
    }


def _choices(model: PolicyModel, architecture: Architecture, layout: Layout) -> Choices:
    """What can replay the routing of this stage's layers."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    first = stage * (architecture.layers // layout.pipeline)
    part = parallel_state.get_tensor_model_parallel_rank() if layout.sequence else 0
    return Choices(list(model.decoder.layers), first, part, layout.tensor if layout.sequence else 1)


def _drop_biases(model: torch.nn.Module, architecture: Architecture) -> None:
    """Megatron has one switch for all biases but the queries'; a folder may have those of one kind only."""
    wanted = {
        "linear_qkv": architecture.qkv_bias,
        "linear_proj": architecture.output_bias,
        "linear_fc1": architecture.mlp_bias,
        "linear_fc2": architecture.mlp_bias,
    }
    for name, module in model.named_modules():
        if not wanted.get(name.rpartition(".")[2], True) and getattr(module, "bias", None) is not None:
            module.register_parameter("bias", None)
