"""The names of one tensor in Megatron and in a Hugging Face folder, and how it is laid out.

Owns the table of names. Invariant: every parameter of the model has exactly one entry, so loading and
exporting visit every tensor once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from gyre.training.architecture import Architecture

Kind = Literal["vocab", "columns", "replicated", "qkv", "gate_up"]
"""vocab: split over ranks on dim 0, rows padded to a multiple; columns: split on dim 1; qkv: queries, key and
value of each key-value group side by side, on dim 0; gate_up: gate above up, each split on dim 0."""


@dataclass(frozen=True)
class Mapping:
    """One Megatron parameter: its tensors in Hugging Face's naming, in the order that `kind` defines."""

    hf: tuple[str, ...]
    kind: Kind


_OUTER: dict[str, tuple[str, Kind]] = {
    "embedding.word_embeddings.weight": ("model.embed_tokens.weight", "vocab"),
    "decoder.final_layernorm.weight": ("model.norm.weight", "replicated"),
    "output_layer.weight": ("lm_head.weight", "vocab"),
}

_LAYER: dict[str, tuple[tuple[str, ...], Kind]] = {
    "input_layernorm.weight": (("input_layernorm.weight",), "replicated"),
    "self_attention.linear_qkv.weight": (
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        "qkv",
    ),
    "self_attention.q_layernorm.weight": (("self_attn.q_norm.weight",), "replicated"),
    "self_attention.k_layernorm.weight": (("self_attn.k_norm.weight",), "replicated"),
    "self_attention.linear_proj.weight": (("self_attn.o_proj.weight",), "columns"),
    "pre_mlp_layernorm.weight": (("post_attention_layernorm.weight",), "replicated"),
    "mlp.linear_fc1.weight": (("mlp.gate_proj.weight", "mlp.up_proj.weight"), "gate_up"),
    "mlp.linear_fc2.weight": (("mlp.down_proj.weight",), "columns"),
}

_QK_NORMS = ("self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight")

_CHECKPOINT = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
"""Megatron's sharded_state_dict names these two norms as Transformer Engine does."""


def mapping(name: str) -> Mapping:
    """The entry of a Megatron parameter, e.g. `decoder.layers.3.mlp.linear_fc2.weight`. KeyError when there
    is none."""
    if name in _OUTER:
        hf, kind = _OUTER[name]
        return Mapping((hf,), kind)
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
    if match is None:
        raise KeyError(name)
    tensors, kind = _LAYER[match[2]]
    return Mapping(tuple(f"model.layers.{match[1]}.{tensor}" for tensor in tensors), kind)


def checkpoint_key(name: str) -> tuple[str, int | None]:
    """A parameter's global array in a checkpoint, and its layer there (layers are stacked on dim 0)."""
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
    if match is None:
        return name, None
    return f"decoder.layers.{_CHECKPOINT.get(match[2], match[2])}", int(match[1])


def megatron_names(architecture: Architecture) -> list[str]:
    """Every parameter of the whole model, in model order."""
    inner = [name for name in _LAYER if architecture.qk_norm or name not in _QK_NORMS]
    layers = [f"decoder.layers.{layer}.{name}" for layer in range(architecture.layers) for name in inner]
    outer = [name for name in _OUTER if not (architecture.tied and name == "output_layer.weight")]
    return [outer[0], *layers, *outer[1:]]


def hf_names(architecture: Architecture) -> list[str]:
    """Every tensor that a Hugging Face folder of this architecture must hold."""
    return [hf for name in megatron_names(architecture) for hf in mapping(name).hf]
