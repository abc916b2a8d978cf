"""Checkpoint folders: crash points, damage, retention. No torch here."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gyre.errors import UserError
from gyre.ledger import checkpoints
from gyre.ledger.checkpoints import CheckpointMeta, CheckpointReader
from gyre.ledger.chunks import ArraySpec, FileRecord, write_chunk

SPECS = [
    ArraySpec("decoder.layers.weight", (2, 4, 3), (1, 2, 3), "float32"),
    ArraySpec("norm", (3,), (3,), "bfloat16"),
]


class Killed(Exception):
    """The writer's end."""


def _data(spec: ArraySpec, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if spec.dtype == "bfloat16":
        return rng.integers(0, 65536, spec.shape).astype(np.uint16)
    return rng.normal(size=spec.shape).astype(np.float32)


def write(
    folder: Path, step: int, lineage: int = 1, nonce: str = "a", kill: Callable[[int], None] = lambda n: None
) -> Path:
    """Write a whole checkpoint; `kill(n)` is called before the n-th file."""
    count = 0

    def before() -> None:
        nonlocal count
        kill(count)
        count += 1

    path = checkpoints.temporary_path(folder, step, lineage, nonce)
    before()
    checkpoints.create(path, SPECS)
    records: list[FileRecord] = []
    for spec in SPECS:
        whole = _data(spec, step)
        for index in np.ndindex(*spec.grid()):
            before()
            offset = tuple(i * c for i, c in zip(index, spec.chunk, strict=True))
            region = tuple(slice(o, o + c) for o, c in zip(offset, spec.chunk, strict=True))
            records.append(write_chunk(path, spec, offset, whole[region]))
    before()
    meta = CheckpointMeta(lineage, step, step + 100, ("m1", "m2"), {"optimizer_steps": step})
    return checkpoints.finish(path, meta, SPECS, records)


FILES = 1 + 4 + 1 + 1


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    path = write(tmp_path, 12)
    assert path.name == "step-000012.zarr" and checkpoints.verify(path) == []
    info, passed = checkpoints.newest_complete(tmp_path)
    assert info is not None and passed == []
    assert info.meta == CheckpointMeta(1, 12, 112, ("m1", "m2"), {"optimizer_steps": 12})
    reader = CheckpointReader(path)
    assert reader.keys() == ["decoder.layers.weight", "norm"]
    assert (reader.dtype("norm"), reader.shape("norm")) == ("bfloat16", (3,))
    for spec in SPECS:
        assert np.array_equal(reader.read(spec.key), _data(spec, 12))
    for offset in np.ndindex(2, 2):  # just a chunk
        region = (slice(offset[0], offset[0] + 1), slice(2 * offset[1], 2 * offset[1] + 2), slice(0, 3))
        assert np.array_equal(reader.read("decoder.layers.weight", region), _data(SPECS[0], 12)[region])
    region = (slice(1, 2), slice(1, 3), slice(0, 3))
    assert np.array_equal(reader.read("decoder.layers.weight", region), _data(SPECS[0], 12)[region])
    with pytest.raises(KeyError, match="nothing"):
        reader.read("nothing")


@pytest.mark.parametrize("at", range(FILES))
def test_a_writer_killed_before_any_file_leaves_nothing_that_counts(tmp_path: Path, at: int) -> None:
    good = write(tmp_path, 1)

    def kill(count: int) -> None:
        if count == at:
            raise Killed

    with pytest.raises(Killed):
        write(tmp_path, 2, kill=kill)
    info, passed = checkpoints.newest_complete(tmp_path)
    assert info is not None and info.path == good and passed == []
    again = write(tmp_path, 2, nonce="b")
    info, _ = checkpoints.newest_complete(tmp_path)
    assert info is not None and info.path == again


def test_a_writer_killed_before_the_rename_counts_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(self: Path, target: Path) -> Path:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(Killed):
            write(tmp_path, 3)
    assert checkpoints.newest_complete(tmp_path) == (None, [])


def test_every_file_that_is_lost_or_changed_is_noticed(tmp_path: Path) -> None:
    older = write(tmp_path, 1)
    newer = write(tmp_path, 2)
    names = [file.name for file in checkpoints.read_info(newer).files] + ["COMPLETE"]
    assert len(names) == 5 + 3 + 1
    for name in names:
        for damage in ("removed", "truncated", "flipped"):
            copy = newer.with_name("step-000003.zarr")
            shutil.copytree(newer, copy)
            file = copy / name
            content = file.read_bytes()
            if damage == "removed":
                file.unlink()
            elif damage == "truncated":
                file.write_bytes(content[:-1])
            else:
                file.write_bytes(bytes([content[0] ^ 1]) + content[1:])
            if not (name == "COMPLETE" and damage == "truncated"):  # a lost newline is no loss
                assert len(checkpoints.verify(copy)) == 1, (name, damage)
                info, passed = checkpoints.newest_complete(tmp_path)
                assert info is not None and info.path == newer
                assert len(passed) == 1 and "step-000003.zarr" in passed[0] and "\n" not in passed[0]
            shutil.rmtree(copy)
    shutil.rmtree(newer)
    info, _ = checkpoints.newest_complete(tmp_path)
    assert info is not None and info.path == older


def test_a_torn_complete_file_at_every_byte(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    content = (path / "COMPLETE").read_bytes()
    for length in range(0, len(content) - 1, 7):
        (path / "COMPLETE").write_bytes(content[:length])
        assert checkpoints.newest_complete(tmp_path)[0] is None


def test_a_missing_or_unknown_chunk_stops_the_writer(tmp_path: Path) -> None:
    path = checkpoints.temporary_path(tmp_path, 1, 1, "a")
    checkpoints.create(path, SPECS)
    records = [write_chunk(path, SPECS[1], (0,), _data(SPECS[1], 1))]
    with pytest.raises(ValueError, match="4 chunks are missing"):
        checkpoints.finish(path, CheckpointMeta(1, 1, 1), SPECS, records)
    with pytest.raises(ValueError, match="no chunk's corner"):
        write_chunk(path, SPECS[0], (0, 1, 0), np.zeros((1, 2, 3), np.float32))
    with pytest.raises(ValueError, match="not"):
        write_chunk(path, SPECS[0], (0, 0, 0), np.zeros((1, 2, 3), np.float64))
    with pytest.raises(ValueError, match="do not divide"):
        ArraySpec("x", (5,), (2,), "float32").grid()


def test_lineages_that_ended_can_be_refused(tmp_path: Path) -> None:
    write(tmp_path, 4, lineage=1)
    write(tmp_path, 5, lineage=1)
    write(tmp_path, 3, lineage=2)
    info, passed = checkpoints.newest_complete(tmp_path, accept=lambda meta: meta.lineage == 2)
    assert info is not None and info.meta.step == 3
    assert len(passed) == 2 and "lineage 1" in passed[0]


@pytest.mark.parametrize("seed", range(40))
def test_a_history_of_lineages_is_read_as_its_steps_that_stand(tmp_path: Path, seed: int) -> None:
    """Lineages open from a checkpoint that stands, save, end; one that does not know of its end saves on. Whoever
    chooses a checkpoint, or removes old ones, goes by what stands."""
    rng = np.random.default_rng(seed)
    openings, kept, zombies = [(1, 0)], {}, []
    step = 0
    for number in range(12):
        lineage = openings[-1][0]
        if rng.random() < 0.3:  # the core is lost; it may have an order to save the next step still
            zombies.append((lineage, step + 1))
            step = int(rng.choice([0, *sorted(kept)[-2:]]))
            openings.append((lineage + 1, step))
            kept = {saved: made_by for saved, made_by in kept.items() if saved <= step}
        elif zombies and rng.random() < 0.4:
            late = zombies.pop()
            path = checkpoints.final_path(tmp_path, late[1])
            if path.exists() and checkpoints.read_info(path).meta.lineage > late[0]:
                with pytest.raises(ValueError, match=f"lineage {late[0]} has ended"):
                    write(tmp_path, late[1], late[0], f"z{number}")
            else:
                write(tmp_path, late[1], late[0], f"z{number}")
        else:
            step += 1
            kept[step] = lineage
            write(tmp_path, step, lineage, f"n{number}")
            checkpoints.prune(tmp_path, 2, lineage, openings)
            kept = dict(sorted(kept.items())[-2:])
        _assert_chosen(tmp_path, openings, kept)


def _assert_chosen(folder: Path, openings: list[tuple[int, int]], kept: dict[int, int]) -> None:
    """`kept`: step -> its lineage, of the newest steps that stand and are kept."""
    newest, _ = checkpoints.chosen(folder, 0, openings)
    assert (newest.meta.step, newest.meta.lineage) == max(kept.items()) if newest is not None else not kept
    for path in folder.glob("step-*.zarr"):
        meta = checkpoints.read_info(path).meta
        if meta.step in kept:
            found, _ = checkpoints.chosen(folder, meta.step, openings)
            assert found is not None and found.meta.lineage == kept[meta.step]
        else:
            with pytest.raises(UserError, match=f"of lineage {meta.lineage}, which ended before"):
                checkpoints.chosen(folder, meta.step, openings)


def test_a_step_that_is_done_again_takes_the_name(tmp_path: Path) -> None:
    write(tmp_path, 4, lineage=1)
    write(tmp_path, 4, lineage=2, nonce="b")
    info, _ = checkpoints.newest_complete(tmp_path)
    assert info is not None and info.meta.lineage == 2
    assert [path.name for path in checkpoints.prune(tmp_path, 2, lineage=3)] == ["step-000004.zarr.void-2-b"]


def test_retention_keeps_the_newest_two_whole_ones(tmp_path: Path) -> None:
    paths = [write(tmp_path, step) for step in range(1, 6)]
    (paths[4] / "norm" / "c.0").unlink()
    left = checkpoints.temporary_path(tmp_path, 6, 1, "x")
    checkpoints.create(left, SPECS)
    assert checkpoints.prune(tmp_path, 1, lineage=1) == [paths[1], paths[0]]
    assert checkpoints.prune(tmp_path, 1, lineage=2) == [left]
    assert sorted(path.name for path in tmp_path.iterdir()) == [path.name for path in paths[2:]]
    assert checkpoints.prune(tmp_path / "none", 2, lineage=9) == []


def test_another_format_is_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    body = json.loads(json.loads((path / "COMPLETE").read_text())["body"]) | {"format": 99}
    text = json.dumps(body)
    (path / "COMPLETE").write_text(json.dumps({"body": text, "digest": checkpoints._text_digest(text)}))
    with pytest.raises(ValueError, match="another gyre"):
        checkpoints.read_info(path)


def test_the_ledger_needs_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, gyre.ledger.checkpoints; sys.exit('torch' in sys.modules or 'zarr' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
