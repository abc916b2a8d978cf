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
value of each key-value group side by side, on dim 0; gate_up: gate above up, each split on dim 0. A bias has the kind
of its weight's rows."""


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
    "self_attention.linear_qkv.bias": (
        ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
        "qkv",
    ),
    "self_attention.q_layernorm.weight": (("self_attn.q_norm.weight",), "replicated"),
    "self_attention.k_layernorm.weight": (("self_attn.k_norm.weight",), "replicated"),
    "self_attention.linear_proj.weight": (("self_attn.o_proj.weight",), "columns"),
    "self_attention.linear_proj.bias": (("self_attn.o_proj.bias",), "replicated"),
    "pre_mlp_layernorm.weight": (("post_attention_layernorm.weight",), "replicated"),
    "mlp.linear_fc1.weight": (("mlp.gate_proj.weight", "mlp.up_proj.weight"), "gate_up"),
    "mlp.linear_fc1.bias": (("mlp.gate_proj.bias", "mlp.up_proj.bias"), "gate_up"),
    "mlp.linear_fc2.weight": (("mlp.down_proj.weight",), "columns"),
    "mlp.linear_fc2.bias": (("mlp.down_proj.bias",), "replicated"),
    "mlp.router.weight": (("mlp.gate.weight",), "replicated"),
}

_EXPERT: dict[str, tuple[tuple[str, ...], Kind]] = {
    "linear_fc1.weight": (("gate_proj.weight", "up_proj.weight"), "gate_up"),
    "linear_fc2.weight": (("down_proj.weight",), "columns"),
}

_INNER = re.compile(r"decoder\.layers\.(\d+)\.(?:mlp\.experts\.local_experts\.(\d+)\.)?(.+)")
"""Layer, expert if any, and the parameter's name there."""

_CHECKPOINT = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
"""Megatron's sharded_state_dict names these two norms as Transformer Engine does."""


def mapping(name: str) -> Mapping:
    """The entry of a parameter of the whole model, e.g. `decoder.layers.3.mlp.linear_fc2.weight`. KeyError when there
    is none."""
    if name in _OUTER:
        hf, kind = _OUTER[name]
        return Mapping((hf,), kind)
    match = _INNER.fullmatch(name)
    if match is None:
        raise KeyError(name)
    layer, expert, inner = match.groups()
    tensors, kind = (_LAYER if expert is None else _EXPERT)[inner]
    prefix = f"model.layers.{layer}." + ("" if expert is None else f"mlp.experts.{expert}.")
    return Mapping(tuple(prefix + tensor for tensor in tensors), kind)


def is_expert(name: str) -> bool:
    """Is a parameter one of an expert's own? Such a one may be in one expert-parallel rank only."""
    return ".local_experts." in name


def checkpoint_key(name: str) -> tuple[str, tuple[int, ...]]:
    """A parameter's global array in a checkpoint, and its place there: layers are stacked on dim 0, a layer's experts
    on dim 1."""
    match = _INNER.fullmatch(name)
    if match is None:
        return name, ()
    layer, expert, inner = match.groups()
    if expert is not None:
        return f"decoder.layers.mlp.experts.experts.{inner}", (int(layer), int(expert))
    return f"decoder.layers.{_CHECKPOINT.get(inner, inner)}", (int(layer),)


def megatron_names(architecture: Architecture) -> list[str]:
    """Every parameter of the whole model, in model order."""
    inner = [name for name in _LAYER if _has(architecture, name)]
    for expert in range(architecture.experts):
        inner += [f"mlp.experts.local_experts.{expert}.{name}" for name in _EXPERT]
    layers = [f"decoder.layers.{layer}.{name}" for layer in range(architecture.layers) for name in inner]
    outer = [name for name in _OUTER if not (architecture.tied and name == "output_layer.weight")]
    return [outer[0], *layers, *outer[1:]]


def _has(architecture: Architecture, name: str) -> bool:
    """Does each layer of this architecture have the parameter `name`?"""
    optional = {
        "self_attention.q_layernorm.weight": architecture.qk_norm,
        "self_attention.k_layernorm.weight": architecture.qk_norm,
        "self_attention.linear_qkv.bias": architecture.qkv_bias,
        "self_attention.linear_proj.bias": architecture.output_bias,
        "mlp.linear_fc1.weight": not architecture.experts,
        "mlp.linear_fc1.bias": architecture.mlp_bias,
        "mlp.linear_fc2.weight": not architecture.experts,
        "mlp.linear_fc2.bias": architecture.mlp_bias,
        "mlp.router.weight": bool(architecture.experts),
    }
    return optional.get(name, True)


def hf_names(architecture: Architecture) -> list[str]:
    """Every tensor that a Hugging Face folder of this architecture must hold."""
    return [hf for name in megatron_names(architecture) for hf in mapping(name).hf]
