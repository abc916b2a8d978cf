"""Checkpoints: Zarr v3 folders that count only with their COMPLETE file.

Owns `RUN/checkpoints/`. Invariant: a folder named `step-NNNNNN.zarr` was complete when it got that name;
whatever happens to it later is found by sizes and digests, and then it is passed over. Needs numpy and
(lazily) zarr, never torch.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gyre.errors import UserError
from gyre.ledger.chunks import DTYPES, ArraySpec, FileRecord, fsync_path, record_of
from gyre.ledger.digest import new_digest

COMPLETE = "COMPLETE"
READERS = 4
"""Files that are verified at a time."""
_NAME = re.compile(r"step-(\d{6,})\.zarr")
_FORMAT = 2


@dataclass(frozen=True)
class CheckpointMeta:
    """What a checkpoint is of. `version` counts publications of weights, `step` optimizer steps of the run;
    `merged` names the micro-steps that made this step; `extra` is the writer's own (JSON)."""

    lineage: int
    step: int
    version: int
    merged: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckpointInfo:
    """A complete checkpoint."""

    path: Path
    meta: CheckpointMeta
    files: tuple[FileRecord, ...]

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


def final_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}.zarr"


def temporary_path(folder: Path, step: int, lineage: int, nonce: str) -> Path:
    """Where a checkpoint is written. `nonce` is handed in and names one attempt."""
    return folder / f"step-{step:06d}.zarr.tmp-{lineage}-{nonce}"


def create(path: Path, arrays: Iterable[ArraySpec]) -> None:
    """Make the folder and the metadata of every array, through zarr; one rank does this, before any chunk is
    written."""
    import zarr

    path.mkdir(parents=True)
    root = zarr.open_group(path, mode="w", zarr_format=3)
    for spec in arrays:
        spec.grid()
        array = root.create_array(
            spec.key,
            shape=spec.shape,
            chunks=spec.chunk,
            dtype=DTYPES[spec.dtype],
            compressors=None,
            filters=None,
            fill_value=0,
            chunk_key_encoding={"name": "default", "separator": "."},
        )
        array.attrs["dtype"] = spec.dtype


def finish(path: Path, meta: CheckpointMeta, arrays: Sequence[ArraySpec], chunks: Iterable[FileRecord]) -> Path:
    """Write COMPLETE, last, and give the folder its name; returns that. One rank does this, after every
    rank's chunks.

    ValueError unless every chunk of every array was recorded once. A folder that already has the name is set
    aside: the caller, who writes this step now, found it void or damaged. ValueError if it is of a later lineage than
    the caller's, which has ended then.
    """
    records = {chunk.name: chunk for chunk in chunks}
    expected: set[str] = set().union(*(spec.chunk_names() for spec in arrays))
    if records.keys() != expected:
        difference = sorted(records.keys() ^ expected)
        raise ValueError(f"{path}: {len(difference)} chunks are missing or unknown, the first is {difference[0]}")
    for name in sorted(p.relative_to(path).as_posix() for p in path.rglob("zarr.json")):
        fsync_path(path / name)
        records[name] = record_of(path, name)
    for inner in sorted(p for p in path.rglob("*") if p.is_dir()):
        fsync_path(inner)
    body = {
        "format": _FORMAT,
        "meta": asdict(meta),
        "files": [asdict(records[name]) for name in sorted(records)],
    }
    text = json.dumps(body, sort_keys=True)
    complete = path / COMPLETE
    complete.write_text(json.dumps({"digest": _text_digest(text), "body": text}) + "\n")
    fsync_path(complete)
    fsync_path(path)
    final = final_path(path.parent, meta.step)
    if final.exists():
        if _lineage(final) > meta.lineage:
            raise ValueError(f"{path}: lineage {meta.lineage} has ended: {final.name} is of {_lineage(final)}")
        final.rename(path.with_name(path.name.replace(".tmp-", ".void-")))
    path.rename(final)
    fsync_path(path.parent)
    return final


def read_info(path: Path) -> CheckpointInfo:
    """Read COMPLETE. ValueError, with a line that says why, when it is missing, torn, or of another
    format."""
    try:
        outer = json.loads((path / COMPLETE).read_text())
        text = outer["body"]
        body = json.loads(text)
        if body["format"] == _FORMAT and outer["digest"] != _text_digest(text):
            raise ValueError("its digest does not fit")
    except FileNotFoundError:
        raise ValueError(f"{path}: no {COMPLETE} file, it was never finished") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: {COMPLETE} is damaged ({error})") from None
    if body["format"] != _FORMAT:
        raise ValueError(f"{path}: of another gyre (format {body['format']}, this one reads {_FORMAT})")
    meta = body["meta"] | {"merged": tuple(body["meta"]["merged"])}
    return CheckpointInfo(path, CheckpointMeta(**meta), tuple(FileRecord(**file) for file in body["files"]))


def verify(path: Path, deep: bool = True) -> list[str]:
    """A line for everything that is wrong; none when the checkpoint is whole. `deep` reads every byte for its
    digest; without it only existence and size are checked."""
    try:
        info = read_info(path)
    except ValueError as error:
        return [str(error)]
    with ThreadPoolExecutor(READERS, "verify") as pool:
        found = pool.map(lambda file: _problem(path, file, deep), info.files)
        return [problem for problem in found if problem]


def _problem(path: Path, file: FileRecord, deep: bool) -> str:
    try:
        size = (path / file.name).stat().st_size
    except FileNotFoundError:
        return f"{path}: {file.name} is missing"
    if size != file.bytes:
        return f"{path}: {file.name} has {size} bytes instead of {file.bytes}"
    if deep and record_of(path, file.name).digest != file.digest:
        return f"{path}: {file.name} has changed, its digest does not fit"
    return ""


def newest_complete(
    folder: Path, deep: bool = True, accept: Callable[[CheckpointMeta], bool] = lambda meta: True
) -> tuple[CheckpointInfo | None, list[str]]:
    """The complete checkpoint with the highest step, and a line for each newer one that was passed over.

    `accept` refuses checkpoints of a lineage that ended before it made them: `stands`, by the journals.
    """
    passed: list[str] = []
    for path in _named(folder):
        problems = verify(path, deep)
        if problems:
            passed.append(problems[0])
            continue
        info = read_info(path)
        if accept(info.meta):
            return info, passed
        passed.append(_void(info))
    return None, passed


def stands(meta: CheckpointMeta, openings: Iterable[tuple[int, int]]) -> bool:
    """Does a checkpoint count? `openings`: (lineage, step that it opened from) of the run's lineages. What a lineage
    made after the step from which a later one opened is void: a core that did not know of its end may have written it.
    """
    return all(meta.lineage >= later or meta.step <= step for later, step in openings)


def chosen(
    folder: Path, step: int, openings: Sequence[tuple[int, int]] = ()
) -> tuple[CheckpointInfo | None, list[str]]:
    """The checkpoint of `step`, or for 0 what `newest_complete` finds; void ones (see `stands`) are passed over.
    UserError for a step that has no whole one that stands."""
    if not step:
        return newest_complete(folder, accept=lambda meta: stands(meta, openings))
    path = final_path(folder, step)
    problems = verify(path) if path.exists() else [f"no checkpoint of step {step} is kept in {folder}"]
    if problems:
        raise UserError(problems[0])
    info = read_info(path)
    if not stands(info.meta, openings):
        raise UserError(_void(info))
    return info, []


def _lineage(path: Path) -> int:
    """0 for a damaged one."""
    try:
        return read_info(path).meta.lineage
    except ValueError:
        return 0


def _void(info: CheckpointInfo) -> str:
    return f"{info.path}: of lineage {info.meta.lineage}, which ended before this step counted"


def prune(folder: Path, keep: int, lineage: int, openings: Sequence[tuple[int, int]] = ()) -> list[Path]:
    """Remove old checkpoints; returns what was removed. Damaged and void ones (see `stands`) do not count towards
    `keep`, and the newest two complete ones always stay. Leftovers of lineages before `lineage` go too: their writers
    are fenced."""
    removed = []
    whole = 0
    for path in _named(folder):
        if whole >= max(keep, 2):
            removed.append(path)
        elif not verify(path, deep=False) and stands(read_info(path).meta, openings):
            whole += 1
    for path in folder.iterdir() if folder.is_dir() else ():
        match = re.search(r"\.zarr\.(?:tmp|void)-(\d+)-", path.name)
        if match and int(match[1]) < lineage:
            removed.append(path)
    for path in removed:
        # Without its COMPLETE file a folder counts for nothing, so a removal that is cut short leaves no half
        # checkpoint.
        (path / COMPLETE).unlink(missing_ok=True)
        shutil.rmtree(path)
    return removed


class CheckpointReader:
    """Reads regions of the global arrays, under any layout."""

    def __init__(self, path: Path) -> None:
        import zarr

        self._root = zarr.open_group(path, mode="r")
        self._arrays: dict[str, Any] = {}
        self.path = path

    def keys(self) -> list[str]:
        return sorted(path.parent.name for path in self.path.glob("*/zarr.json"))

    def dtype(self, key: str) -> str:
        """The tensor's dtype: `read` gives bfloat16 as uint16."""
        return str(self._array(key).attrs["dtype"])

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._array(key).shape)

    def read(self, key: str, region: tuple[slice, ...] = ()) -> np.ndarray:
        """A copy of a region (all of it by default). KeyError for a key that the checkpoint does not hold."""
        array = self._array(key)
        chunk = tuple(array.chunks)
        corner = tuple(part.start // size for part, size in zip(region, chunk, strict=False))
        ends = tuple(slice(c * size, (c + 1) * size) for c, size in zip(corner, chunk, strict=False))
        if len(region) == len(chunk) and region == ends:
            # Just one chunk, as under the layout that wrote it: its file is the array's bytes.
            whole = np.fromfile(self.path / key / ("c." + ".".join(map(str, corner))), dtype=array.dtype)
            return whole.reshape(chunk)
        return np.ascontiguousarray(array[region or ...])

    def _array(self, key: str) -> Any:
        if key not in self._arrays:
            if key not in self._root:
                raise KeyError(f"{self.path} holds no array {key}")
            self._arrays[key] = self._root[key]
        return self._arrays[key]


def _named(folder: Path) -> list[Path]:
    """Folders with a checkpoint's name, highest step first."""
    found = [(int(match[1]), path) for path in folder.glob("step-*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def _text_digest(text: str) -> str:
    return new_digest(text.encode()).hexdigest()
