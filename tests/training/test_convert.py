"""Names and layouts: bit-exact round trips under tensor parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gyre.errors import UserError
from gyre.training.architecture import read_architecture
from gyre.training.convert import to_hf, to_megatron
from gyre.training.names import checkpoint_key, hf_names, mapping, megatron_names
from gyre.training.state import _entries, _shards
from gyre.training.weights import load_hf

KINDS = [
    "qwen3",
    "qwen3-untied",
    "qwen3-bias",
    "llama",
    "llama-tied",
    "llama-biases",
    "llama-mlp-bias",
    "qwen2",
    "experts",
    "experts-not-normalised",
]


@pytest.mark.parametrize("parallel", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_round_trip_is_bit_exact(make_folder: Any, helpers: Any, parallel: int, kind: str) -> None:
    from safetensors.torch import load_file

    folder = make_folder(**helpers.kinds[kind])
    architecture = read_architecture(folder)
    tensors = load_file(folder / "model.safetensors")
    seen: list[str] = []
    for name in megatron_names(architecture):
        entry = mapping(name)
        whole = [tensors[hf] for hf in entry.hf]
        shards = [to_megatron(entry, whole, architecture, parallel, rank) for rank in range(parallel)]
        back = to_hf(entry, shards, architecture)
        assert all(torch.equal(one, other) for one, other in zip(back, whole, strict=True)), name
        seen.extend(entry.hf)
    assert sorted(seen) == sorted(tensors)


@pytest.mark.parametrize("kind", KINDS)
def test_names_and_places_are_those_of_the_model(make_folder: Any, make_trainer: Any, helpers: Any, kind: str) -> None:
    """Also the places in a checkpoint, by Megatron's own description of the shards."""
    trainer = make_trainer(path=make_folder(**helpers.kinds[kind]))
    names = [name for name, _ in trainer.model.named_parameters()]
    assert sorted(names) == sorted(megatron_names(trainer.architecture))
    assert set(helpers.kinds) == set(KINDS)
    for name, entry in _entries(trainer.model).items():
        (shard, *_) = _shards(entry, trainer.model.get_parameter(name), prefix="", writes=True)
        key, place = checkpoint_key(name)
        assert (shard.spec.key, shard.offset[: len(place)]) == (key, place), name


def test_number_of_tensors(make_folder: Any, helpers: Any) -> None:
    """Counted by hand: 11 in a dense layer, 9 and three an expert in a mixture."""
    assert len(hf_names(read_architecture(make_folder()))) == 2 + 2 * 11
    assert len(hf_names(read_architecture(make_folder(**helpers.experts)))) == 2 + 2 * (9 + 3 * 4)


def test_a_folder_with_a_missing_or_foreign_tensor_is_refused(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    architecture = read_architecture(folder)
    tensors = load_file(folder / "model.safetensors")
    model = torch.nn.Module()
    save_file({k: v for k, v in tensors.items() if k != "model.norm.weight"}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.norm\.weight is missing"):
        load_hf(model, folder, architecture)
    save_file(tensors | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(4)}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"q_proj\.bias"):
        load_hf(model, folder, architecture)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="no \\*.safetensors"):
        load_hf(model, folder, architecture)
    (folder / "model.safetensors").write_bytes(b"not one")
    with pytest.raises(UserError, match="cannot be read"):
        load_hf(model, folder, architecture)


def test_a_sharded_folder_is_loaded_whole(folder: Path, make_trainer: Any) -> None:
    from safetensors.torch import load_file, save_file

    digest = make_trainer().weights_digest()
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    (folder / "model.safetensors").unlink()
    for part in range(2):
        save_file(
            {name: tensors[name] for name in names[part::2]},
            folder / f"model-{part + 1:05d}-of-00002.safetensors",
        )
    assert make_trainer().weights_digest() == digest
