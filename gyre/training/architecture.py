"""What a Hugging Face folder's config.json says about the model, for the models that gyre trains.

Owns the list of supported architectures. Invariant: whatever would make our model differ from the folder's
model is refused here, with the key that says so; nothing is ignored silently.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre.errors import UserError

_SUPPORTED = {"Qwen3ForCausalLM": True, "LlamaForCausalLM": False}
"""Class name -> whether queries and keys are normalised per head."""


@dataclass(frozen=True)
class Architecture:
    """A dense decoder with full attention, SwiGLU, RMSNorm and plain rotary positions."""

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
        raise UserError(f"{path}: architecture {name} is not supported; gyre trains {', '.join(sorted(_SUPPORTED))}")
    try:
        _refuse_extras(path, config)
        return _architecture(config, _SUPPORTED[name])
    except KeyError as error:
        raise UserError(f"{path}: key {error.args[0]} is missing") from None


def _architecture(config: dict[str, Any], qk_norm: bool) -> Architecture:
    heads = int(config["num_attention_heads"])
    hidden = int(config["hidden_size"])
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
        qk_norm=qk_norm,
        tied=bool(config.get("tie_word_embeddings", False)),
        max_positions=int(config.get("max_position_embeddings", 2048)),
    )


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """transformers 5 writes `rope_parameters`; older ones `rope_scaling` beside `rope_theta`."""
    return dict(config.get("rope_parameters") or config.get("rope_scaling") or {})


def _refuse_extras(path: Path, config: dict[str, Any]) -> None:
    def refuse(key: str, what: str) -> None:
        raise UserError(f"{path}: {key} = {config.get(key)!r}: {what} is not supported")

    rope = _rope(config)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        refuse("rope_parameters" if "rope_parameters" in config else "rope_scaling", f"rope scaling {kind!r}")
    if float(rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))) != 1.0:
        refuse("partial_rotary_factor", "partial rotary embedding")
    if config.get("hidden_act", "silu") != "silu":
        refuse("hidden_act", "an activation other than silu")
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            refuse(key, "a bias")
    if config.get("use_sliding_window"):
        refuse("use_sliding_window", "sliding-window attention")
    if any(kind != "full_attention" for kind in config.get("layer_types") or []):
        refuse("layer_types", "a layer without full attention")
    if config.get("num_experts") or config.get("num_local_experts"):
        refuse("num_experts" if config.get("num_experts") else "num_local_experts", "mixture of experts")
    if config.get("quantization_config"):
        refuse("quantization_config", "a quantised model")
    if config.get("pretraining_tp", 1) != 1:
        refuse("pretraining_tp", "a value other than 1")
