"""Checkpoints: write and read GB/s, and peak extra memory, against torch.save, safetensors and torch DCP on the same
bytes: `python tests/bench/bench_checkpoint.py [--mib 192] [--rounds 3]`.

Order within a round is random; a share of torch.save's speed is the median over the rounds.
Every way is written until fsync has returned for all its files and folders. gyre's own includes the digest of every
file; its reading is timed with and without verifying them. Reads come from the page cache, for all alike.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from gyre.ledger.checkpoints import CheckpointMeta, CheckpointReader, final_path, newest_complete
from gyre.ledger.chunks import ArraySpec, fsync_path
from gyre.training import layout, state

LAYER = (1024, 2048)
"""8 MiB of fp32."""

Way = tuple[str, Callable[[Path], object], Callable[[Path], object]]


def tensors(mib: int) -> dict[str, torch.Tensor]:
    """Weights of layers, and as many small ones."""
    generator = torch.Generator().manual_seed(1)
    made: dict[str, torch.Tensor] = {}
    for index in range(max(1, mib // 8)):
        made[f"layer.{index}"] = torch.randn(LAYER, generator=generator)
        made[f"norm.{index}"] = torch.randn(2048, generator=generator)
    return made


def shards(data: dict[str, torch.Tensor]) -> list[state.Shard]:
    """One stacked array for each kind, as a trainer's rank has them."""
    count = len(data) // 2
    made = []
    for name, tensor in data.items():
        kind, _, index = name.partition(".")
        spec = ArraySpec(kind, (count, *tensor.shape), (1, *tensor.shape), "float32")
        made.append(state.Shard(spec, (int(index), *(0 for _ in tensor.shape)), tensor, writes=True))
    return made


def synced(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        fsync_path(path)
    fsync_path(folder)


def ways(data: dict[str, torch.Tensor]) -> list[Way]:
    mine = shards(data)
    arrays = {shard.spec.key: shard.spec for shard in mine}

    def write_dcp(folder: Path) -> None:
        dcp.save(dict(data), checkpoint_id=str(folder / "dcp"), no_dist=True)
        synced(folder)

    def read_dcp(folder: Path) -> None:
        into = {name: torch.empty_like(tensor) for name, tensor in data.items()}
        dcp.load(into, checkpoint_id=str(folder / "dcp"), no_dist=True)

    def write_torch(folder: Path) -> None:
        torch.save(data, folder / "all.pt")
        synced(folder)

    def write_safetensors(folder: Path) -> None:
        save_file(data, folder / "all.safetensors")
        synced(folder)

    def read_safetensors(folder: Path) -> None:
        for tensor in load_file(folder / "all.safetensors").values():
            tensor.clone()  # what is loaded is a memory map

    def write_gyre(folder: Path) -> None:
        state.write(mine, arrays, folder, CheckpointMeta(1, 1, 1), "n")

    def read_gyre(folder: Path) -> None:
        reader = CheckpointReader(final_path(folder, 1))
        for shard in mine:
            state.fill(reader, state.Shard(shard.spec, shard.offset, torch.empty_like(shard.tensor), False))

    def verified(folder: Path) -> None:
        assert newest_complete(folder)[0] is not None
        read_gyre(folder)

    return [
        ("gyre (digests, COMPLETE)", write_gyre, read_gyre),
        ("gyre, read with digests", write_gyre, verified),
        ("torch.save", write_torch, lambda folder: torch.load(folder / "all.pt")),
        ("safetensors", write_safetensors, read_safetensors),
        ("torch DCP", write_dcp, read_dcp),
    ]


def status(name: str) -> int:
    """Bytes of a line of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) << 10
    return 0


def peak(work: Callable[[Path], object], folder: Path) -> int:
    """Bytes that `work` needs at its peak, beyond what is resident before."""
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    work(folder)
    return status("VmHWM") - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    layout.start(layout.Layout())
    data = tensors(options.mib)
    total = sum(tensor.nbytes for tensor in data.values())
    every = ways(data)
    seconds: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name, _, _ in every}
    extra: dict[str, int] = {}
    dice = random.Random(1)
    for _ in range(options.rounds):
        for name, write, read in dice.sample(every, len(every)):  # in turn: a busy moment falls on all of them
            folder = Path(tempfile.mkdtemp(dir=os.environ.get("TMPDIR")))
            began = time.perf_counter()
            extra[name] = peak(write, folder)
            middle = time.perf_counter()
            read(folder)
            seconds[name][0].append(middle - began)
            seconds[name][1].append(time.perf_counter() - middle)
            shutil.rmtree(folder)
    layout.stop()
    print(f"{total / 1e6:.0f} MB, one writer, medians of {options.rounds}, fsync included")
    print(f"{'':26} write GB/s   of torch.save   read GB/s   peak extra MB of the write")
    for name, (writes, reads) in seconds.items():
        wrote, got = (total / statistics.median(values) / 1e9 for values in (writes, reads))
        share = statistics.median(theirs / own for theirs, own in zip(seconds["torch.save"][0], writes, strict=True))
        print(f"{name:26} {wrote:10.2f} {share:14.2f} {got:11.2f} {extra[name] / 1e6:11.0f}")


if __name__ == "__main__":
    main()
