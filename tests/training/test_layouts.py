"""Every layout does what one rank does, and reads what any other has saved, bit for bit."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gyre.ledger.checkpoints import CheckpointReader, final_path, verify
from gyre.ledger.routing import NO_EXPERTS
from gyre.training.architecture import read_architecture
from gyre.training.export import export_checkpoint
from tests.training.layout_ranks import CASES, RANKS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

DTYPES = ("float32", "bfloat16")
MOMENT = "optimizer.exp_avg."


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, helpers: Any) -> Path:
    """The folder that the four ranks have left."""
    work = tmp_path_factory.mktemp("layouts")
    helpers.write_folder(work).rename(work / "tied")
    helpers.write_folder(work, tie_word_embeddings=False).rename(work / "untied")
    helpers.write_folder(work, **helpers.kinds["llama-biases"]).rename(work / "biases")
    helpers.write_folder(work, **helpers.experts).rename(work / "experts")
    for index, lengths in enumerate([[37, 20, 51], [64, 9], [30, 30, 30]]):
        made = helpers.make_batch(lengths, seed=index)
        experts = helpers.draw_experts(made, read_architecture(work / "experts").mixture(), seed=index)
        experts[::5] = NO_EXPERTS
        np.save(work / f"experts-{index}.npy", experts)
        batch = dataclasses.asdict(made)
        np.savez(work / f"batch-{index}.npz", **{name: value for name, value in batch.items() if value is not None})
    program = str(Path(__file__).with_name("layout_ranks.py"))
    argv = [sys.executable, program, str(work)]
    processes = [subprocess.Popen([*argv, str(rank)], stderr=subprocess.PIPE, text=True) for rank in range(RANKS)]
    try:
        while None in (codes := [process.poll() for process in processes]) and not any(codes):
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
    errors = [process.communicate()[1] for process in processes]
    assert codes == [0] * RANKS, "\n".join(errors)[-3000:]
    return work


def arrays(path: Path, prefix: str = "") -> Iterator[tuple[str, np.ndarray]]:
    assert verify(path) == []
    reader = CheckpointReader(path)
    for key in list(reader.keys()):
        if key.startswith(prefix):
            yield key, reader.read(key)


def same_rows(one: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Without the vocabulary's padding, which depends on the layout."""
    rows = min(len(one), len(other))
    return one[:rows], other[:rows]


def layouts(*dtypes: str) -> list[tuple[str, str]]:
    return [(case, name) for case, found in CASES.items() if found.dtype in dtypes for name in found.layouts]


def crossings(*dtypes: str) -> list[tuple[str, str, str]]:
    found = [(case, each.crossed) for case, each in CASES.items() if each.dtype in dtypes]
    return [(case, *pair) for case, crossed in found for pair in product(crossed, repeat=2)]


@pytest.mark.parametrize(("case", "name"), layouts("float32"))
def test_fp32_trains_what_one_rank_trains(trained: Path, case: str, name: str) -> None:
    one, out = (np.load(trained / f"out-{case}-{layout}.npz") for layout in ("one", name))
    assert np.abs(out["logprobs"] - one["logprobs"]).max() <= 1e-5
    assert out["losses"] == pytest.approx(one["losses"], rel=1e-5, abs=1e-6)
    assert float(out["norm"]) == pytest.approx(float(one["norm"]), rel=1e-5)
    # Adam's first moment after one step is the clipped gradient times a constant
    reference = dict(arrays(final_path(trained / case / "one", 1), MOMENT))
    found = dict(arrays(final_path(trained / case / name, 1), MOMENT))
    assert found.keys() == reference.keys()
    pairs = {key: same_rows(found[key], reference[key]) for key in reference}
    squares = {key: float((b.astype(np.float64) ** 2).sum()) for key, (_, b) in pairs.items()}
    difference = np.sqrt(sum(float(((a.astype(np.float64) - b) ** 2).sum()) for a, b in pairs.values()))
    assert difference <= np.sqrt(sum(squares.values())) * 1e-5
    assert all(squares.values())  # a gradient reaches every parameter


@pytest.mark.parametrize(("case", "name"), layouts("bfloat16"))
def test_bf16_trains_nearly_what_one_rank_trains(trained: Path, case: str, name: str) -> None:
    one, out = (np.load(trained / f"out-{case}-{layout}.npz") for layout in ("one", name))
    difference = np.abs(out["logprobs"] - one["logprobs"])
    if "experts" in case:  # where two experts are nearly equal, rounding chooses
        assert np.median(difference) <= 5e-2
    else:
        assert difference.max() <= 5e-2
    assert float(out["norm"]) == pytest.approx(float(one["norm"]), rel=1e-1 if "experts" in case else 2e-2)


@pytest.mark.parametrize(("case", "name"), layouts(*DTYPES))
def test_every_layout_gives_engines_and_exports_what_it_saves(trained: Path, case: str, name: str) -> None:
    from safetensors.torch import load_file

    given = load_file(trained / case / f"{name}-hf" / "model.safetensors")
    export_checkpoint(final_path(trained / case / name, 1), trained / CASES[case].model, trained / "exported")
    saved = load_file(trained / "exported" / "model.safetensors")
    assert given.keys() == saved.keys() == load_file(trained / CASES[case].model / "model.safetensors").keys()
    assert all(torch.equal(given[tensor], saved[tensor]) for tensor in saved)


@pytest.mark.parametrize(("case", "saver", "loader"), crossings(*DTYPES))
def test_a_checkpoint_goes_through_any_other_layout(trained: Path, case: str, saver: str, loader: str) -> None:
    saved = dict(arrays(final_path(trained / case / saver, 1)))
    again = dict(arrays(final_path(trained / case / f"{saver}-{loader}", 1)))
    assert again.keys() == saved.keys()
    assert any(key.startswith("optimizer.main.") for key in saved) == (CASES[case].dtype == "bfloat16")
    for key, value in saved.items():
        one, other = same_rows(value, again[key])
        assert np.array_equal(one.view(np.uint8), other.view(np.uint8)), key


@pytest.mark.parametrize(("case", "saver", "loader"), crossings("float32"))
def test_training_goes_on_from_any_others_checkpoint(trained: Path, case: str, saver: str, loader: str) -> None:
    here, there = (np.load(trained / f"norms-{case}-{layout}.npz") for layout in (saver, loader))
    assert float(there[saver]) == pytest.approx(float(here[saver]), rel=1e-5)
