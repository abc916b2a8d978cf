"""Micro-step files: equal content has an equal digest, and damage anywhere is found."""

from __future__ import annotations

import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from gyre.errors import UserError
from gyre.ledger.microstep_files import digest, read_microstep, write_microstep
from gyre.ledger.microsteps import MicroStep

from .samples import microstep

SHARED = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)


def same(a: MicroStep, b: MicroStep) -> bool:
    return all(np.array_equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(MicroStep))


@SHARED
@given(st.integers(0, 1000), st.integers(0, 40), st.integers(0, 10), st.integers(0, 4))
def test_what_is_written_is_read(tmp_path: Path, seed: int, tokens: int, targets: int, samples: int) -> None:
    ms = microstep(seed, tokens, targets, samples)
    path = tmp_path / "step-000003" / "1-00000.arrow"
    name = write_microstep(path, ms)
    read, read_name = read_microstep(path)
    assert same(ms, read) and name == read_name == digest(read)
    assert read.tokens.dtype == np.int32 and read.weights.dtype == np.float32
    assert read.tokens.flags.writeable and read.targets == targets
    assert os.listdir(path.parent) == [path.name]


def test_the_digest_is_of_the_content_alone() -> None:
    ms = microstep()
    strided = np.stack([ms.tokens, ms.tokens], axis=1)[:, 0]
    wide: Any = ms.tokens.astype(np.int64)
    assert digest(ms) == digest(replace(ms, tokens=strided)) == digest(replace(ms, tokens=wide))
    assert len(digest(ms)) == 32


@pytest.mark.parametrize("name", [f.name for f in fields(MicroStep)])
def test_every_field_is_in_the_digest(name: str) -> None:
    ms = microstep()
    value: Any = getattr(ms, name)
    if name == "step":
        changed: Any = value + 1
    elif name == "executions":
        changed = (*value[:-1], "other")
    else:
        changed = value.copy()
        changed[0] += 1
    assert digest(replace(ms, **{name: changed})) != digest(ms)


def test_neighbouring_fields_do_not_run_together() -> None:
    ms = microstep()
    moved = replace(
        ms, attempts=ms.attempts[:0], advantages=np.concatenate([ms.attempts.view(np.float32), ms.advantages])
    )
    assert digest(moved) != digest(ms)
    assert digest(replace(ms, executions=("a", "b"))) != digest(replace(ms, executions=("ab", "")))


@SHARED
@given(st.data())
def test_any_cut_is_found(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "1-00000.arrow"
    write_microstep(path, microstep())
    whole = path.read_bytes()
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(UserError, match=r"1-00000\.arrow is "):
        read_microstep(path)


@SHARED
@given(st.data())
def test_any_damaged_byte_is_found_or_harmless(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "1-00000.arrow"
    ms = microstep()
    write_microstep(path, ms)
    whole = bytearray(path.read_bytes())
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(whole)
    try:
        read, _ = read_microstep(path)
    except UserError as error:
        read, message = None, str(error)
    if read is None:
        assert "1-00000.arrow" in message
    else:
        assert same(read, ms)  # the byte was padding, or one of Arrow's two copies of the schema


@pytest.mark.parametrize("word", ["gyre.table", "microstep", "gyre.schema", "gyre.digest"])
def test_any_damaged_byte_of_the_metadata_is_found_or_harmless(tmp_path: Path, word: str) -> None:
    path = tmp_path / "1-00000.arrow"
    ms = microstep()
    write_microstep(path, ms)
    whole = path.read_bytes()
    places = [at for at in range(len(whole)) if whole.startswith(word.encode(), at)]
    assert places
    found = 0
    for place in [start + offset for start in places for offset in range(len(word))]:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            read, message = read_microstep(path)[0], ""
        except UserError as error:
            read, message = None, str(error)
        # harmless: it was in the other one of Arrow's two copies of the schema
        assert "1-00000.arrow" in message if read is None else same(read, ms)
        found += read is None
    assert found >= len(word)


def test_content_under_another_digest_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    write_microstep(path, microstep(1))
    table = pa.ipc.open_file(str(path)).read_all()
    metadata = {**table.schema.metadata, b"gyre.digest": digest(microstep(2)).encode()}
    with pa.ipc.new_file(str(path), table.schema.with_metadata(metadata)) as writer:
        writer.write_table(table.replace_schema_metadata(metadata))
    with pytest.raises(UserError, match="its content is not what its digest .* says"):
        read_microstep(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    with pytest.raises(UserError, match="does not exist"):
        read_microstep(path)
    path.write_bytes(b"")
    with pytest.raises(UserError, match="is damaged"):
        read_microstep(path)
    with pa.ipc.new_file(str(path), pa.schema([("a", pa.int32())])):
        pass
    with pytest.raises(UserError, match="is not a micro-step"):
        read_microstep(path)
    with pa.ipc.new_file(str(path), pa.schema([], metadata={"gyre.table": "microstep", "gyre.schema": "4"})):
        pass
    with pytest.raises(UserError, match="schema 4 of micro-steps; this gyre reads up to 3"):
        read_microstep(path)


def test_a_file_of_schema_1_is_one_of_paths(tmp_path: Path) -> None:
    """Its digest is the one that it was announced with: a run that began before there were trees replays."""
    ms = replace(microstep(), parents=np.zeros(0, np.int32), experts=np.zeros((0, 0, 0), np.uint16))
    assert digest(ms) == "2220d91fff0d8ef278fd435824e3d1fb"
    path = tmp_path / "a.arrow"
    write_microstep(path, ms)
    table = pa.ipc.open_file(str(path)).read_all()
    metadata = {**table.schema.metadata, b"gyre.schema": b"1"}
    old = table.drop_columns(["parents", "experts", "experts_shape"]).replace_schema_metadata(metadata)
    with pa.ipc.new_file(str(path), old.schema) as writer:
        writer.write_table(old)
    read, name = read_microstep(path)
    assert same(ms, read) and name == digest(ms)


def test_experts_of_another_shape_are_other_content() -> None:
    ms = microstep()
    assert digest(replace(ms, experts=ms.experts.reshape(-1, 3, 2))) != digest(ms)


def test_two_dimensional_fields_are_refused(tmp_path: Path) -> None:
    ms = microstep()
    with pytest.raises(ValueError, match="one-dimensional"):
        write_microstep(tmp_path / "a.arrow", replace(ms, tokens=ms.tokens.reshape(2, -1)))
    assert os.listdir(tmp_path) == []
