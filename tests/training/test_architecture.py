"""config.json: what is read, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gyre.errors import UserError
from gyre.training.architecture import read_architecture


def _folder(tmp_path: Path, config: dict[str, Any]) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_qwen3_and_llama_are_read(tmp_path: Path, helpers: Any) -> None:
    qwen = read_architecture(_folder(tmp_path, helpers.config))
    assert (qwen.layers, qwen.heads, qwen.kv_heads, qwen.head_dim) == (2, 4, 2, 16)
    assert qwen.qk_norm and qwen.tied and qwen.rope_theta == 10000.0
    old = {k: v for k, v in helpers.config.items() if k not in ("rope_parameters", "head_dim", "num_key_value_heads")}
    llama = read_architecture(_folder(tmp_path, old | helpers.llama | {"rope_theta": 5e5, "rope_scaling": None}))
    assert (llama.kv_heads, llama.head_dim, llama.rope_theta) == (4, 16, 5e5)
    assert not llama.qk_norm and not llama.tied


def test_biases_and_experts_are_read(tmp_path: Path, helpers: Any) -> None:
    def biases(**changes: Any) -> tuple[bool, bool, bool]:
        read = read_architecture(_folder(tmp_path, helpers.config | changes))
        return read.qkv_bias, read.output_bias, read.mlp_bias

    assert biases() == (False, False, False)
    assert biases(attention_bias=True) == (True, True, False)
    assert biases(**helpers.llama, mlp_bias=True) == (False, False, True)
    assert biases(**helpers.kinds["qwen2"]) == (True, False, False)
    old = read_architecture(_folder(tmp_path, helpers.config | helpers.experts))
    found = old.mixture()
    assert (found.layers, found.experts, found.chosen) == (old.layers, old.experts, old.experts_per_token)
    assert (old.experts, old.experts_per_token, old.expert_ffn, old.normalise_experts) == (4, 2, 48, True)
    renamed = {key: value for key, value in helpers.experts.items() if key not in ("num_experts", "norm_topk_prob")}
    new = read_architecture(_folder(tmp_path, helpers.config | renamed | {"num_local_experts": 8}))
    assert (new.experts, new.normalise_experts) == (8, False)
    with pytest.raises(UserError, match="num_experts is missing"):
        read_architecture(_folder(tmp_path, helpers.config | renamed))


def test_the_vocabulary_is_padded_to_a_multiple(tmp_path: Path, helpers: Any) -> None:
    architecture = read_architecture(_folder(tmp_path, helpers.config))
    with pytest.raises(UserError, match="trajectory.record: .* dense"):
        architecture.mixture()
    assert [architecture.padded_vocab(n) for n in (1, 2, 4)] == [601, 602, 604]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architectures = 'MambaForCausalLM'"),
        ({"architectures": ["Qwen3NextForCausalLM"]}, "architectures"),
        ({"num_experts": 8}, "num_experts = 8"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": [0]}, "mlp_only_layers"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 2}, "decoder_sparse_step"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": True}, "attention_bias"),
        ({"rope_parameters": {"rope_theta": 1e4, "mrope_section": [8, 8]}}, "rope_parameters.*mrope_section"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters.*full_attention"),
        ({"sliding_window": 4096}, "sliding_window = 4096"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn"}}, "yarn"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
    ],
)
def test_what_is_not_implemented_is_refused(tmp_path: Path, helpers: Any, change: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=word) as caught:
        read_architecture(_folder(tmp_path, helpers.config | change))
    assert "config.json" in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_or_broken_config_is_one_line(tmp_path: Path, helpers: Any) -> None:
    with pytest.raises(UserError, match="no such file"):
        read_architecture(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="JSON"):
        read_architecture(tmp_path)
    config = {key: value for key, value in helpers.config.items() if key != "hidden_size"}
    with pytest.raises(UserError, match="hidden_size is missing"):
        read_architecture(_folder(tmp_path, config))
