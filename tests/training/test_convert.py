"""Names and layouts: bit-exact round trips under tensor parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gyre.errors import UserError
from gyre.training.architecture import read_architecture
from gyre.training.convert import to_hf, to_megatron
from gyre.training.names import hf_names, mapping, megatron_names
from gyre.training.weights import load_hf


@pytest.mark.parametrize("parallel", [1, 2])
@pytest.mark.parametrize("llama", [False, True])
def test_round_trip_is_bit_exact(make_folder: Any, helpers: Any, parallel: int, llama: bool) -> None:
    from safetensors.torch import load_file

    folder = make_folder(**(helpers.llama if llama else {}))
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


def test_names_are_those_of_the_model(make_trainer: Any) -> None:
    trainer = make_trainer()
    names = [name for name, _ in trainer.model.named_parameters()]
    assert sorted(names) == sorted(megatron_names(trainer.architecture))
    assert len(hf_names(trainer.architecture)) == 2 + 2 * 11


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
