"""What a Hugging Face folder's config.json says about the model, for the models that gyre trains.

Owns the list of supported architectures. Invariant: whatever would make our model differ from the folder's
model is refused here, with the key that says so; nothing is ignored silently.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre.errors import UserError
from gyre.ledger.routing import Mixture


@dataclass(frozen=True)
class _Family:
    """What a transformers class does that its config.json does not say."""

    qk_norm: bool = False
    qkv_bias: bool = False
    """Queries, keys and values have a bias whatever `attention_bias` says, and the output has none."""
    experts: bool = False


_SUPPORTED = {
    "LlamaForCausalLM": _Family(),
    "Qwen2ForCausalLM": _Family(qkv_bias=True),
    "Qwen3ForCausalLM": _Family(qk_norm=True),
    "Qwen3MoeForCausalLM": _Family(qk_norm=True, experts=True),
}


@dataclass(frozen=True)
class Architecture:
    """A decoder with full attention, RMSNorm, plain rotary positions, and SwiGLU, dense or in experts."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    rope_theta: float
    norm_eps: float
    qk_norm: bool
    tied: bool
    """The output layer shares the embedding's weight."""
    max_positions: int
    qkv_bias: bool = False
    output_bias: bool = False
    """Of the attention's output projection."""
    mlp_bias: bool = False
    experts: int = 0
    """A layer's experts; 0: a dense model."""
    experts_per_token: int = 0
    expert_ffn: int = 0
    normalise_experts: bool = False
    """The chosen experts' probabilities are scaled to a sum of 1."""

    def mixture(self) -> Mixture:
        """The layers of experts, whose routing is to be recorded. Raises UserError for a dense model."""
        if not self.experts:
            raise UserError('trajectory.record: "routing" is of a mixture of experts, and this model is dense: drop it')
        return Mixture(layers=self.layers, experts=self.experts, chosen=self.experts_per_token)

    def padded_vocab(self, tensor_parallel: int) -> int:
        """Rows of the embedding when it is split over `tensor_parallel` ranks: the next multiple."""
        return -(-self.vocab // tensor_parallel) * tensor_parallel


def read_architecture(folder: Path) -> Architecture:
    """Read `folder`/config.json. UserError when it is missing, unreadable, or not a model that gyre
    trains."""
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; model.path must be a Hugging Face folder") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error})") from None
    name = (config.get("architectures") or ["none"])[0]
    if name not in _SUPPORTED:
        known = ", ".join(sorted(_SUPPORTED))
        raise UserError(f"{path}: architectures = {name!r}: not supported; gyre trains {known}")
    try:
        _refuse_extras(path, config, _SUPPORTED[name])
        return _architecture(config, _SUPPORTED[name])
    except KeyError as error:
        raise UserError(f"{path}: key {error.args[0]} is missing") from None


def _architecture(config: dict[str, Any], family: _Family) -> Architecture:
    heads = int(config["num_attention_heads"])
    hidden = int(config["hidden_size"])
    bias = bool(config.get("attention_bias")) and not family.qkv_bias
    return Architecture(
        layers=int(config["num_hidden_layers"]),
        hidden=hidden,
        ffn=int(config["intermediate_size"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        vocab=int(config["vocab_size"]),
        rope_theta=float(_rope(config).get("rope_theta") or config.get("rope_theta") or 10000.0),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        qk_norm=family.qk_norm,
        tied=bool(config.get("tie_word_embeddings", False)),
        max_positions=int(config.get("max_position_embeddings", 2048)),
        qkv_bias=bias or family.qkv_bias,
        output_bias=bias,
        mlp_bias=bool(config.get("mlp_bias")),
        **(_experts(config) if family.experts else {}),
    )


def _experts(config: dict[str, Any]) -> dict[str, Any]:
    """transformers 5 writes `num_local_experts`; older ones `num_experts`."""
    return {
        "experts": int(config.get("num_local_experts") or config["num_experts"]),
        "experts_per_token": int(config["num_experts_per_tok"]),
        "expert_ffn": int(config["moe_intermediate_size"]),
        "normalise_experts": bool(config.get("norm_topk_prob", False)),
    }


_ROPE_KEYS = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """transformers 5 writes `rope_parameters`; older ones `rope_scaling` beside `rope_theta`."""
    return dict(config.get("rope_parameters") or config.get("rope_scaling") or {})


def _refuse_extras(path: Path, config: dict[str, Any], family: _Family) -> None:
    def refuse(key: str, what: str) -> None:
        raise UserError(f"{path}: {key} = {config.get(key)!r}: {what} is not supported")

    rope, key = _rope(config), "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        refuse(key, f"rope scaling {kind!r}")
    if unknown := sorted(rope.keys() - _ROPE_KEYS):
        refuse(key, f"{unknown[0]} in it")
    if float(rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))) != 1.0:
        refuse("partial_rotary_factor", "partial rotary embedding")
    if config.get("hidden_act", "silu") != "silu":
        refuse("hidden_act", "an activation other than silu")
    if config.get("use_sliding_window"):
        refuse("use_sliding_window", "sliding-window attention")
    if config.get("sliding_window") and config.get("use_sliding_window") is None:
        refuse("sliding_window", "sliding-window attention")
    if any(kind != "full_attention" for kind in config.get("layer_types") or []):
        refuse("layer_types", "a layer without full attention")
    if config.get("quantization_config"):
        refuse("quantization_config", "a quantised model")
    if config.get("pretraining_tp", 1) != 1:
        refuse("pretraining_tp", "a value other than 1")
    if family.experts:
        _refuse_mixtures(config, refuse)
        return
    for key in ("num_experts", "num_local_experts"):
        if config.get(key):
            refuse(key, "mixture of experts in this architecture")


def _refuse_mixtures(config: dict[str, Any], refuse: Callable[[str, str], None]) -> None:
    """What a mixture of experts may not have: dense layers among the others, and biases."""
    if config.get("decoder_sparse_step", 1) != 1:
        refuse("decoder_sparse_step", "a dense layer among layers of experts")
    if config.get("mlp_only_layers"):
        refuse("mlp_only_layers", "a dense layer among layers of experts")
    if config.get("attention_bias"):
        refuse("attention_bias", "a bias beside experts")
    if config.get("shared_expert_intermediate_size"):
        refuse("shared_expert_intermediate_size", "a shared expert")
