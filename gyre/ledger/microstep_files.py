"""Micro-steps on disk: one Arrow file each, with a digest of their content.

Owns the file format. Invariants: a file is complete when its name exists, and never changes; equal content has an
equal digest, whatever wrote it; a file whose content is not what its digest says is not read.
"""

from __future__ import annotations

from dataclasses import fields
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gyre.errors import UserError
from gyre.ledger.files import written_aside
from gyre.ledger.microsteps import MicroStep

SCHEMA_VERSION = 3
"""3 has `experts`, 2 has `parents`; a file of an earlier one is one without."""

_INTS = (
    "tokens",
    "positions",
    "segments",
    "target_rows",
    "target_tokens",
    "target_samples",
    "target_turns",
    "target_offsets",
    "target_versions",
    "target_lineages",
    "attempts",
    "dispatch_versions",
    "parents",
)
_FLOATS = ("behaviour_logprobs", "advantages", "weights", "temperatures")
_ARRAYS: dict[str, np.dtype[Any]] = {name: np.dtype("<i4") for name in _INTS}
_ARRAYS |= {name: np.dtype("<f4") for name in _FLOATS}
_EXPERTS: dict[str, np.dtype[Any]] = {"experts": np.dtype("<u2"), "experts_shape": np.dtype("<i4")}
"""A table of three dimensions: flat, and its shape."""
_SCHEMA = pa.schema(
    [("step", pa.int32()), ("executions", pa.list_(pa.string()))]
    + [(name, pa.list_(pa.int32() if name in _INTS else pa.float32())) for name in _ARRAYS]
    + [("experts", pa.list_(pa.uint16())), ("experts_shape", pa.list_(pa.int32()))]
)
_OPTIONAL = ("parents", "experts", "experts_shape")
assert {f.name for f in fields(MicroStep)} == set(_SCHEMA.names) - {"experts_shape"}


def _array(ms: MicroStep, name: str) -> npt.NDArray[np.generic]:
    """The field as little-endian 32-bit values, one-dimensional."""
    array = np.ascontiguousarray(getattr(ms, name), dtype=_ARRAYS[name])
    if array.ndim != 1:
        raise ValueError(f"micro-step field {name} has shape {array.shape}: it must be one-dimensional")
    return array


def digest(ms: MicroStep) -> str:
    """blake2b (16 bytes, hex) over every field: name, length in bytes and bytes, in the order of their names.

    What is optional and empty is left out: paths have the digest that they had before there were trees.
    """
    content = {
        "step": str(ms.step).encode(),
        "executions": "\0".join(ms.executions).encode(),
    }
    content |= {name: _array(ms, name).tobytes() for name in _ARRAYS if name != "parents" or len(ms.parents)}
    if len(ms.experts):
        content["experts"] = np.ascontiguousarray(ms.experts, dtype="<u2").tobytes()
        content["experts_shape"] = str(ms.experts.shape).encode()
    state = blake2b(digest_size=16)
    for name in sorted(content):
        state.update(b"%b %d\n" % (name.encode(), len(content[name])))
        state.update(content[name])
    return state.hexdigest()


def write_microstep(path: Path, ms: MicroStep) -> str:
    """Writes `ms` aside, fsyncs and renames it; returns its digest. Makes the folder of the step when absent.

    Raises LedgerWriteError when the file system refuses.
    """
    columns = [
        pa.array([ms.step], pa.int32()),
        pa.array([list(ms.executions)], pa.list_(pa.string())),
    ]
    arrays = [_array(ms, name) for name in _ARRAYS]
    arrays += [np.ascontiguousarray(ms.experts, dtype="<u2").reshape(-1), np.array(ms.experts.shape, dtype="<i4")]
    for array in arrays:
        columns.append(pa.ListArray.from_arrays(pa.array([0, len(array)], pa.int32()), pa.array(array)))
    name = digest(ms)
    metadata = {
        "gyre.table": "microstep",
        "gyre.schema": str(SCHEMA_VERSION),
        "gyre.digest": name,
    }
    schema = _SCHEMA.with_metadata(metadata)
    batch = pa.RecordBatch.from_arrays(columns, schema=schema)
    options = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", compression_level=1))
    with (
        written_aside(path, parents=True) as aside,
        pa.OSFile(str(aside), "wb") as sink,
        pa.ipc.new_file(sink, schema, options=options) as writer,
    ):
        writer.write_batch(batch)
    return name


def read_microstep(path: Path) -> tuple[MicroStep, str]:
    """The micro-step and its digest, verified. Arrays are the caller's own.

    Raises UserError that names the file when it is absent, damaged, not a micro-step, or of a newer gyre.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path} does not exist", code=1) from None
    try:
        reader = pa.ipc.open_file(pa.py_buffer(data))
        metadata = reader.schema.metadata or {}
        _check_metadata(metadata, path)
        batch = reader.get_batch(0)
        batch.validate(full=True)
        ms = _from_batch(batch)
        expected = metadata[b"gyre.digest"].decode("ascii", "replace")
    except (
        pa.ArrowException,
        EOFError,
        OSError,
        KeyError,
        ValueError,
        IndexError,
    ) as error:
        # Damage shows in many ways, in Arrow's framing or in ours; all of them mean the same to the reader.
        raise UserError(f"{path} is damaged: {error}", code=1) from error
    if digest(ms) != expected:
        raise UserError(
            f"{path} is damaged: its content is not what its digest {expected} says",
            code=1,
        )
    return ms, expected


def _check_metadata(metadata: dict[bytes, bytes], path: Path) -> None:
    if metadata.get(b"gyre.table") != b"microstep":
        raise UserError(f"{path} is not a micro-step of gyre", code=1)
    version = int(metadata[b"gyre.schema"])
    if version > SCHEMA_VERSION:
        raise UserError(
            f"{path} has schema {version} of micro-steps; this gyre reads up to {SCHEMA_VERSION}: use a newer gyre",
            code=1,
        )


def _from_batch(batch: pa.RecordBatch) -> MicroStep:
    if batch.num_rows != 1:
        raise ValueError(f"{batch.num_rows} rows instead of one")
    arrays: dict[str, Any] = {
        name: np.array(batch.column(name).flatten().to_numpy(zero_copy_only=False), dtype=dtype)
        for name, dtype in (_ARRAYS | _EXPERTS).items()
        if name not in _OPTIONAL or name in batch.schema.names
    }
    if (shape := arrays.pop("experts_shape", None)) is not None:
        arrays["experts"] = arrays["experts"].reshape(shape)
    executions = tuple(batch.column("executions")[0].as_py())
    return MicroStep(step=batch.column("step")[0].as_py(), executions=executions, **arrays)
