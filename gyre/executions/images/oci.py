"""OCI images on disk: an archive (tar) or a layout folder; their manifest, their configuration, their layers.

Owns the reading. Invariants: a blob counts only with the digest that names it; an image is one manifest, for this
machine's architecture; the manifest's digest names the image.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import re
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, cast

import msgspec
from msgspec import Struct, field

from gyre.executions.images.unpack import ImageError, unpack_layer

MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
MOST_JSON = 16 << 20
ADVICE = "make one with: skopeo copy docker://NAME oci-archive:FILE"


class ImageConfig(Struct, frozen=True):
    """What an image says of its use. `workdir` "" means /, `user` "" root."""

    env: dict[str, str] = field(default_factory=dict)
    workdir: str = ""
    user: str = ""


class _Settings(Struct):
    """Of the image's own configuration, in its own names."""

    Env: list[str] | None = None
    WorkingDir: str | None = None
    User: str | None = None


class OciImage(Struct, frozen=True, kw_only=True):
    """`digest` is the manifest's, `layers` those of the (compressed) layers with their media types, lowest first."""

    digest: str
    config: ImageConfig
    layers: tuple[tuple[str, str], ...]


def is_layout(folder: Path) -> bool:
    return (folder / "oci-layout").is_file()


def read_oci(path: Path) -> OciImage:
    """The image for this machine in an OCI archive or layout folder. Raises ImageError; OSError, tarfile.TarError."""
    with _blobs(path) as blobs:
        index = blobs.json_of("index.json")
        digest = _manifest_digest(blobs, index)
        manifest = blobs.json_of(digest)
        config = blobs.json_of(_digest_of(manifest.get("config", {})))
        layers = tuple((_digest_of(layer), str(layer.get("mediaType", ""))) for layer in manifest.get("layers", []))
    return OciImage(digest=digest, config=_config_of(config.get("config") or {}), layers=layers)


def _config_of(settings: Any) -> ImageConfig:
    try:
        found = msgspec.convert(settings, _Settings)
    except msgspec.ValidationError as error:
        raise ImageError(f"its configuration: {error}") from error
    pairs = (word.partition("=") for word in found.Env or [])
    return ImageConfig({name: value for name, _, value in pairs}, found.WorkingDir or "", found.User or "")


def unpack_oci(path: Path, image: OciImage, root: Path) -> None:
    """Lay all layers of `image` over the empty folder `root`. Raises ImageError; OSError, tarfile.TarError."""
    with _blobs(path) as blobs:
        for digest, kind in image.layers:
            blobs.check(digest)
            with blobs.open(digest) as blob, _decompressed(blob, kind) as plain:
                try:
                    with tarfile.open(fileobj=plain, mode="r|") as layer:
                        unpack_layer(layer, root)
                except ImageError as error:
                    raise ImageError(f"layer {digest[7:19]}: {error}") from None


class _Blobs:
    """The files of an archive or of a layout folder, by name or digest."""

    def __init__(self, folder: Path | None, archive: tarfile.TarFile | None) -> None:
        self._folder, self._archive = folder, archive
        members = archive.getmembers() if archive is not None else []
        self._members = {member.name.removeprefix("./"): member for member in members}

    @contextmanager
    def open(self, name: str) -> Iterator[BufferedReader]:
        path = f"blobs/sha256/{name[7:]}" if DIGEST.fullmatch(name) else name
        if self._folder is not None:
            try:
                with open(self._folder / path, "rb") as file:
                    yield file
            except FileNotFoundError:
                raise ImageError(f"{path} is missing ({ADVICE})") from None
            return
        member = self._members.get(path)
        found = self._archive.extractfile(member) if self._archive is not None and member is not None else None
        if found is None:
            raise ImageError(f"{path} is missing ({ADVICE})")
        with found:
            yield cast(BufferedReader, found)

    def check(self, digest: str) -> None:
        with self.open(digest) as blob:
            if (found := hashlib.file_digest(blob, "sha256").hexdigest()) != digest[7:]:
                raise ImageError(f"blob {digest[7:19]} has the digest {found[:12]}: the archive is damaged")

    def json_of(self, name: str) -> dict[str, Any]:
        if DIGEST.fullmatch(name):
            self.check(name)
        with self.open(name) as blob:
            try:
                found = json.loads(blob.read(MOST_JSON))
            except ValueError as error:
                raise ImageError(f"{name} is not readable as JSON: {error}") from None
        if not isinstance(found, dict):
            raise ImageError(f"{name} is not an object")
        return found


@contextmanager
def _blobs(path: Path) -> Iterator[_Blobs]:
    if path.is_dir():
        yield _Blobs(path, None)
        return
    try:
        with tarfile.open(path, "r:") as archive:
            yield _Blobs(None, archive)
    except tarfile.TarError as error:
        raise ImageError(f"not readable as an OCI archive: {error} ({ADVICE})") from None


def _digest_of(descriptor: Any) -> str:
    digest = str(descriptor.get("digest", "")) if isinstance(descriptor, dict) else ""
    if not DIGEST.fullmatch(digest):
        raise ImageError(f"{digest!r} is not a sha256 digest")
    return digest


def _manifest_digest(blobs: _Blobs, index: dict[str, Any], depth: int = 0) -> str:
    """Of the manifest for this machine; an index may point to another one."""
    wanted = MACHINES.get(platform.machine(), platform.machine())
    entries = [entry for entry in index.get("manifests", []) if _is_for(entry, wanted)]
    if not entries:
        raise ImageError(f"no image for linux/{wanted} in it")
    if len(entries) > 1:
        raise ImageError(f"{len(entries)} images for linux/{wanted} in it, and one is wanted")
    digest = _digest_of(entries[0])
    if "index" in str(entries[0].get("mediaType")) or "manifest.list" in str(entries[0].get("mediaType")):
        if depth > 2:
            raise ImageError("an index of indexes of indexes")
        return _manifest_digest(blobs, blobs.json_of(digest), depth + 1)
    return digest


def _is_for(entry: Any, machine: str) -> bool:
    """An entry that names no platform is for every machine; attestations name an unknown one."""
    platform_ = entry.get("platform") if isinstance(entry, dict) else None
    return not platform_ or (platform_.get("os"), platform_.get("architecture")) == ("linux", machine)


@contextmanager
def _decompressed(blob: IO[bytes], kind: str) -> Iterator[Any]:
    """The plain tar stream of a layer, by the first bytes of the blob (media types are not always told right)."""
    head = blob.read(4)
    blob.seek(0)
    if head[:2] == b"\x1f\x8b":
        import gzip

        with gzip.open(blob) as plain:
            yield plain
    elif head == b"\x28\xb5\x2f\xfd":
        import pyarrow

        with pyarrow.CompressedInputStream(pyarrow.PythonFile(blob, mode="r"), "zstd") as plain:
            yield _Reader(plain)
    elif kind.endswith("tar") or head == b"" or kind == "":
        yield blob
    else:
        raise ImageError(f"a layer of {kind or 'an unknown kind'}: gzip, zstd and plain ones are covered")


class _Reader(io.RawIOBase):
    """`read(n)` of n bytes, unless the stream ends: tarfile takes a short read for the end."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def read(self, size: int = -1) -> bytes:
        pieces: list[bytes] = []
        while size != 0 and (piece := self._stream.read(size)):
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)
