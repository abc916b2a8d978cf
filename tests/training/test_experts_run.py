"""A whole run of a mixture of experts whose cells spread them over two ranks and train with the experts that the engine
chose: rollout by the reference engine, a merge, audit, replay, export."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from gyre.ledger.microstep_files import read_microstep
from recipes.tiny_model.build import build
from tests.chaos import moments
from tests.chaos.harness import SMALL_MICROSTEPS, Drill

SPREAD = (*SMALL_MICROSTEPS, "train.data_parallel=2", "train.expert_parallel=2")
REPLAYED = ('trajectory.record=["routing"]', "train.routing_replay=true")


def _experts(folder: Path, tokenizer: Path) -> Path:
    """A random Qwen3-MoE of four experts with the tiny model's tokenizer."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    dense = json.loads((tokenizer / "config.json").read_text())
    kept = ("vocab_size", "max_position_embeddings", "eos_token_id", "pad_token_id", "tie_word_embeddings")
    config = Qwen3MoeConfig(
        **{key: dense[key] for key in kept if key in dense},
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        moe_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
    )
    shutil.copytree(tokenizer, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json", "COMPLETE"))
    torch.manual_seed(5)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_mixture_of_experts_trains_spread_over_the_ranks_of_cells(tmp_path: Path, cache: Path) -> None:
    from transformers import AutoModelForCausalLM

    build(tmp_path / "dense", seed=1, steps=0)
    model = _experts(tmp_path / "experts", tmp_path / "dense")
    (tmp_path / "runs").mkdir()
    settings = (f"model.path={model}", "model.build=", "model.build_arguments=[]", *SPREAD, *REPLAYED)
    drill = Drill(tmp_path / "runs", cache, steps=2, settings=settings)
    try:
        drill.submit()
        drill.until(moments.live)
        drill.until_both_train()
        drill.assert_completed()
    finally:
        drill.stop()
    assert moments.merged(drill.state)  # a satellite's gradients of its ranks' experts were added
    drill.assert_replays(2)
    stats = [done.stats for cell in drill.state.cells.values() for done in cell[1].done.values()]
    assert any(found["compared"] for found in stats)
    assert max(found["difference_max"] for found in stats) < 1e-3  # the engine and the trainer hold one model
    for name in [name for step in drill.state.steps.values() for name in step.microsteps]:
        microstep, _ = read_microstep(drill.run.microsteps / f"{name}.arrow")
        assert microstep.experts.shape == (len(microstep.tokens), 2, 2)
        known = (microstep.experts < 4).all(axis=(1, 2))
        assert known[microstep.target_rows].all()  # what predicted a sampled token went through the engine's layers
    exported = drill.command("export", "drill", "--to", str(tmp_path / "out"))
    assert exported.returncode == 0, exported.stderr
    before, after = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (model, tmp_path / "out"))
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert any("experts" in name for name in moved) and any("gate.weight" in name for name in moved)
