"""A tiny model folder, micro-steps for it, and trainers that leave no process group behind."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from gyre.ledger.routing import Mixture
from gyre.training.architecture import read_architecture
from gyre.training.batch import MicroStepBatch
from gyre.training.layout import Layout
from gyre.training.names import hf_names
from gyre.training.settings import TrainSettings
from gyre.training.trainer import Trainer

torch.set_num_threads(1)

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 601,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False}
EXPERTS: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3-untied": {"tie_word_embeddings": False},
    "qwen3-bias": {"attention_bias": True},
    "llama": LLAMA,
    "llama-tied": LLAMA | {"tie_word_embeddings": True},
    "llama-biases": LLAMA | {"attention_bias": True, "mlp_bias": True},
    "llama-mlp-bias": LLAMA | {"mlp_bias": True, "num_key_value_heads": 4},
    "qwen2": QWEN2,
    "experts": EXPERTS,
    "experts-not-normalised": EXPERTS | {"norm_topk_prob": False, "tie_word_embeddings": False},
}
"""Changes to CONFIG that make every kind of model which gyre trains."""

MakeFolder = Callable[..., Path]


def _shape(name: str, config: dict[str, Any]) -> tuple[int, ...]:
    hidden, dim = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    ffn = config["moe_intermediate_size"] if ".experts." in name else config["intermediate_size"]
    shapes = {
        "embed_tokens": (config["vocab_size"], hidden),
        "lm_head": (config["vocab_size"], hidden),
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
        "q_norm": (dim,),
        "k_norm": (dim,),
        "gate": (config.get("num_experts", 0), hidden),
        "gate_proj": (ffn, hidden),
        "up_proj": (ffn, hidden),
        "down_proj": (hidden, ffn),
    }
    shape = shapes.get(name.split(".")[-2], (hidden,))
    return shape[:1] if name.endswith(".bias") else shape


def write_folder(parent: Path, **changes: Any) -> Path:
    """A Hugging Face folder below `parent` with random fp32 weights; `changes` to config.json."""
    from safetensors.torch import save_file

    config = CONFIG | changes
    folder = parent / f"model-{len(list(parent.glob('model-*')))}"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(11)
    tensors = {}
    for name in hf_names(read_architecture(folder)):
        noise = torch.randn(_shape(name, config), generator=generator)
        tensors[name] = 1 + 0.1 * noise if name.endswith("norm.weight") else 0.15 * noise
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def make_folder(tmp_path: Path) -> MakeFolder:
    """make_folder(**changes to config.json) -> a Hugging Face folder with random fp32 weights."""
    return partial(write_folder, tmp_path)


@pytest.fixture
def folder(make_folder: MakeFolder) -> Path:
    return make_folder()


@pytest.fixture
def make_trainer(folder: Path) -> Iterator[Callable[..., Trainer]]:
    """make_trainer(core=True, path=folder, **settings): a loaded trainer; the one before is closed first."""
    open_trainers: list[Trainer] = []

    def make(core: bool = True, path: Path = folder, **settings: Any) -> Trainer:
        while open_trainers:
            open_trainers.pop().close()
        trainer = Trainer(path, TrainSettings(**settings), Layout(), core)
        open_trainers.append(trainer)
        trainer.load_hf()
        return trainer

    yield make
    while open_trainers:
        open_trainers.pop().close()


def make_batch(lengths: list[int], seed: int = 0, padding: int = 0) -> MicroStepBatch:
    """Paths of these lengths; the later half of each is targets. Behaviour log-probabilities near
    ln(1/600)."""
    rng = np.random.default_rng(seed)
    total, paths = sum(lengths), len(lengths)
    tokens = rng.integers(0, 601, total + padding).astype(np.int32)
    positions = np.concatenate([np.arange(length) for length in [*lengths, padding]]).astype(np.int32)
    segments = np.repeat([*range(paths), -1], [*lengths, padding]).astype(np.int32)
    starts = np.cumsum([0, *lengths[:-1]])
    rows = np.concatenate([np.arange(s + n // 2, s + n - 1) for s, n in zip(starts, lengths, strict=True)])
    return MicroStepBatch(
        tokens=tokens,
        positions=positions,
        segments=segments,
        target_rows=rows.astype(np.int32),
        target_tokens=tokens[rows + 1],
        behaviour_logprobs=rng.normal(-6.4, 0.3, len(rows)).astype(np.float32),
        samples=segments[rows],
        advantages=rng.normal(size=paths).astype(np.float32),
        weights=rng.uniform(0.2, 1.0, paths).astype(np.float32),
        temperatures=rng.uniform(0.7, 1.3, paths).astype(np.float32),
    )


def draw_experts(batch: MicroStepBatch, mixture: Mixture, seed: int = 0) -> npt.NDArray[np.uint16]:
    """For each row and layer different experts, in any order."""
    rng = np.random.default_rng(seed)
    shape = (len(batch.tokens), mixture.layers, mixture.experts)
    return rng.random(shape).argsort(axis=-1)[..., : mixture.chosen].astype(np.uint16)


def take(batch: MicroStepBatch, paths: list[int]) -> MicroStepBatch:
    """The micro-step that holds only these paths, in this order."""
    tokens = [np.flatnonzero(batch.segments == path) for path in paths]
    targets = [np.flatnonzero(batch.samples == path) for path in paths]
    place = {int(row): new for new, row in enumerate(np.concatenate(tokens))}
    rows, columns = np.concatenate(tokens), np.concatenate(targets)
    return replace(
        batch,
        tokens=batch.tokens[rows],
        positions=batch.positions[rows],
        segments=np.repeat(np.arange(len(paths)), [len(t) for t in tokens]).astype(np.int32),
        target_rows=np.array([place[int(row)] for row in batch.target_rows[columns]], dtype=np.int32),
        target_tokens=batch.target_tokens[columns],
        behaviour_logprobs=batch.behaviour_logprobs[columns],
        samples=np.repeat(np.arange(len(paths)), [len(t) for t in targets]).astype(np.int32),
        advantages=batch.advantages[paths],
        weights=batch.weights[paths],
        temperatures=batch.temperatures[paths],
    )


def gradient(trainer: Trainer, *batches: MicroStepBatch) -> torch.Tensor:
    """The gradient sum of these micro-steps, from zero, as one flat copy."""
    trainer.zero_gradients()
    for batch in batches:
        trainer.train_microstep(batch)
    return torch.cat([buffer.clone() for buffer in trainer.gradients_flat()])


def close_in_norm(one: torch.Tensor, other: torch.Tensor, tolerance: float = 1e-5) -> bool:
    """|one - other| <= tolerance * |other|, by norms."""
    return float((one.double() - other.double()).norm()) <= tolerance * float(other.double().norm())


@pytest.fixture(scope="session")
def helpers() -> Any:
    """The functions above, for test files that cannot import a conftest."""

    class Helpers:
        write_folder = staticmethod(write_folder)
        make_batch = staticmethod(make_batch)
        draw_experts = staticmethod(draw_experts)
        take = staticmethod(take)
        gradient = staticmethod(gradient)
        close_in_norm = staticmethod(close_in_norm)
        config = CONFIG
        llama = LLAMA
        experts = EXPERTS
        kinds = KINDS

    return Helpers
