"""A Hugging Face folder, written: shards of safetensors, their index, and the small files of the model's own folder.

Owns the writing. Invariants: no more is held in memory than one shard of tensors and the tensor that did not fit into
it; a folder that was cut short has no `config.json`, so that nothing takes it for a model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch

SHARD_BYTES = 4 << 30
_WEIGHTS = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx")


def write_hf(
    tensors: Iterable[tuple[str, torch.Tensor]], model_folder: Path, out: Path, shard_bytes: int = SHARD_BYTES
) -> None:
    """A folder that transformers loads: config and tokenizer of `model_folder`, weights of `tensors`, taken one by
    one. config.json is copied byte for byte unless its dtype is not that of the weights."""
    out.mkdir(parents=True, exist_ok=True)
    shards = _Shards(out)
    for name, tensor in tensors:
        if shards.held and shards.held + tensor.nbytes > shard_bytes:
            shards.save()
        shards.add(name, tensor)
    shards.save()
    _name_shards(out, shards)
    _copy_small_files(Path(model_folder), out)
    _write_config(Path(model_folder), out, shards.dtype)


class _Shards:
    """The shard in hand, and where the tensors before it went."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.held = 0
        """bytes of the shard in hand"""
        self.count, self.total, self.dtype = 0, 0, ""
        self.places: dict[str, int] = {}
        self._tensors: dict[str, torch.Tensor] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self._tensors[name] = tensor.contiguous()
        self.held += tensor.nbytes
        self.total += tensor.nbytes
        self.dtype = str(tensor.dtype).removeprefix("torch.")

    def save(self) -> None:
        """Write the shard in hand and forget its tensors."""
        from safetensors.torch import save_file

        self.count += 1
        save_file(self._tensors, self.out / _part(self.count), metadata={"format": "pt"})
        self.places |= dict.fromkeys(self._tensors, self.count)
        self._tensors, self.held = {}, 0


def _part(number: int) -> str:
    """A shard's name while it is not known how many there will be."""
    return f"part-{number:05d}.safetensors"


def _name_shards(out: Path, shards: _Shards) -> None:
    """The names that transformers looks for: one file, or numbered ones with an index."""
    count = shards.count
    if count == 1:
        (out / _part(1)).rename(out / "model.safetensors")
        return
    names = {number: f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)}
    for number, name in names.items():
        (out / _part(number)).rename(out / name)
    weight_map = {tensor: names[number] for tensor, number in shards.places.items()}
    text = json.dumps({"metadata": {"total_size": shards.total}, "weight_map": weight_map}, indent=2)
    (out / "model.safetensors.index.json").write_text(text + "\n")


def _copy_small_files(model_folder: Path, out: Path) -> None:
    for path in sorted(model_folder.iterdir()):
        if path.is_file() and path.name != "config.json" and not path.name.endswith(_WEIGHTS):
            shutil.copyfile(path, out / path.name)


def _write_config(model_folder: Path, out: Path, dtype: str) -> None:
    text = (model_folder / "config.json").read_text()
    config = json.loads(text)
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    if config.get(key) != dtype:
        config[key] = dtype
        text = json.dumps(config, indent=2) + "\n"
    (out / "config.json").write_text(text)
