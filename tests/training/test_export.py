"""Hugging Face folders, in and out: what is written, how much is held meanwhile, and experts' gradients."""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gyre.errors import UserError
from gyre.ledger.checkpoints import CheckpointMeta
from gyre.training.export import export_checkpoint
from gyre.training.folder import write_hf


def _stored(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype is other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["qwen3", "llama-biases", "experts"])
def test_a_folder_comes_out_as_it_went_in(
    make_folder: Any, make_trainer: Any, helpers: Any, kind: str, dtype: str, tmp_path: Path
) -> None:
    """Through the model, and through a checkpoint: every tensor bit for bit, the config byte for byte."""
    from safetensors.torch import save_file

    folder = make_folder(**helpers.kinds[kind], dtype=dtype)
    tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in _stored(folder).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "tokenizer.json").write_text("{}")
    trainer = make_trainer(path=folder, dtype=dtype)
    trainer.export_hf(tmp_path / "straight")
    saved = trainer.save_checkpoint(tmp_path, CheckpointMeta(1, 1, 1), "n")
    export_checkpoint(saved.path, folder, tmp_path / "saved")
    for out in (tmp_path / "straight", tmp_path / "saved"):
        assert _same(_stored(out), tensors)
        for name in ("config.json", "tokenizer.json"):
            assert (out / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.parametrize("kind", ["qwen3-bias", "llama", "experts"])
def test_an_exported_step_has_the_trained_models_logits(
    make_folder: Any, make_trainer: Any, helpers: Any, kind: str, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    folder = make_folder(**helpers.kinds[kind])
    trainer, batch = make_trainer(path=folder, clip=(0.5, 0.5)), helpers.make_batch([40, 23])
    trainer.train_microstep(batch)
    trainer.commit(1, 1e-3)
    saved = trainer.save_checkpoint(tmp_path, CheckpointMeta(1, 1, 1), "n")
    export_checkpoint(saved.path, folder, tmp_path / "out")
    assert not _same(_stored(tmp_path / "out"), _stored(folder))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert theirs.dtype is torch.float32
    tokens = torch.from_numpy(batch.tokens[:40].astype(np.int64))
    with torch.no_grad():
        logits = theirs(tokens[None]).logits[0]
        ours = trainer.model.logits(trainer.model(tokens, torch.arange(40)))[:, :601]
    assert float((ours - logits).abs().max()) <= 1e-5


def test_experts_get_the_gradient_that_transformers_computes(make_folder: Any, make_trainer: Any, helpers: Any) -> None:
    """Of the sum of the targets' log-probabilities, for every tensor of the folder, the router's among them."""
    from transformers import AutoModelForCausalLM

    folder = make_folder(**helpers.experts, dtype="float32")
    trainer, tokens = (
        make_trainer(path=folder),
        torch.randint(0, 601, (50,), generator=torch.Generator().manual_seed(3)),
    )
    theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", experts_implementation="eager")
    rows, targets = torch.arange(49), tokens[1:]
    theirs(tokens[None]).logits[0].log_softmax(dim=-1)[rows, targets].sum().backward()
    expected = _by_folder_name({name: p.grad for name, p in theirs.named_parameters()})

    ours = trainer.model.logits(trainer.model(tokens, torch.arange(50))).log_softmax(dim=-1)[rows, targets].sum()
    ours.backward()
    for parameter in trainer.model.parameters():
        parameter.data = parameter.main_grad.clone()
    found = dict(trainer.hf_tensors())
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert helpers.close_in_norm(found[name], gradient, 1e-4), name
        assert float(gradient.norm()) > 0, name


def _by_folder_name(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """transformers stacks a layer's experts in two parameters."""
    out = {}
    for name, gradient in gradients.items():
        prefix, stacked, kind = name.rpartition(".experts.")
        if not stacked:
            out[name] = gradient
            continue
        for expert, whole in enumerate(gradient):
            parts = whole.chunk(2) if kind == "gate_up_proj" else [whole]
            for part, projection in zip(parts, ("gate_proj", "up_proj") if len(parts) == 2 else ("down_proj",)):
                out[f"{prefix}.experts.{expert}.{projection}.weight"] = part
    return out


def test_large_models_are_written_in_shards_of_which_one_is_held(folder: Path, tmp_path: Path) -> None:
    """40 tensors of 1000 bytes in shards of 4500: the writer may hold four, and the one that it was handed last."""
    alive: set[int] = set()
    most = 0

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for number in range(40):
            tensor = torch.full((250,), float(number))
            alive.add(number)
            weakref.finalize(tensor, alive.discard, number)
            most = max(most, len(alive))
            yield f"t{number:02d}", tensor
            del tensor

    write_hf(tensors(), folder, tmp_path / "out", shard_bytes=4500)
    assert most <= 5
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 40_000 and len(index["weight_map"]) == 40
    shards = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert shards == [f"model-{number:05d}-of-00010.safetensors" for number in range(1, 11)]
    from safetensors.torch import load_file

    for name, shard in index["weight_map"].items():
        assert float(load_file(tmp_path / "out" / shard)[name][0]) == float(name[1:])


def test_transformers_loads_shards(folder: Path, make_trainer: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    trainer = make_trainer()
    write_hf(trainer.hf_tensors(), folder, tmp_path / "out", shard_bytes=100_000)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in trainer.hf_tensors())
    assert make_trainer(path=tmp_path / "out").weights_digest() == make_trainer().weights_digest()


def test_an_export_that_is_cut_short_is_no_model(folder: Path, tmp_path: Path) -> None:
    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.zeros(10)
        yield "b", torch.zeros(10)
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        write_hf(tensors(), folder, tmp_path / "out", shard_bytes=40)
    assert (tmp_path / "out" / "part-00001.safetensors").exists()
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize(
    ("kind", "shape", "refusal"),
    [
        ("experts", {"data": 2}, ""),
        ("experts", {"data": 2, "expert": 2}, ""),
        ("experts", {"tensor": 2, "sequence": True}, ""),
        ("experts", {"tensor": 2, "sequence": True, "expert": 2}, ""),
        ("experts", {"tensor": 2}, "train.sequence_parallel = false: a mixture of experts"),
        ("experts", {"data": 3, "expert": 3}, "train.expert_parallel = 3 does not divide the model's 4 experts"),
        ("odd", {"tensor": 2, "sequence": True}, "train.tensor_parallel = 2 does not divide the model's 47 experts'"),
        ("odd", {"tensor": 2, "sequence": True, "expert": 2}, ""),
        ("qwen3", {"data": 2, "expert": 2}, "train.expert_parallel = 2, but the model has no experts"),
    ],
)
def test_layouts_of_a_mixture_of_experts(
    make_folder: Any, helpers: Any, kind: str, shape: dict[str, Any], refusal: str
) -> None:
    from gyre.training.architecture import read_architecture
    from gyre.training.layout import Layout

    kinds = helpers.kinds | {"odd": helpers.experts | {"moe_intermediate_size": 47}}
    architecture = read_architecture(make_folder(**kinds[kind]))
    world = shape.get("tensor", 1) * shape.get("data", 1)
    layout = Layout(world=world, **shape, rendezvous="file:///x")
    if not refusal:
        layout.check(architecture)
        return
    with pytest.raises(UserError, match=re.escape(refusal)):
        layout.check(architecture)
