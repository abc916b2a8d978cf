"""Images for tests, made on the spot: a small system of the host's own programs, and OCI archives and SIFs of it."""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import shutil
import struct
import subprocess
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow

from gyre.executions.images.oci import MACHINES

PROGRAMS = ("bash", "cat", "chmod", "cp", "echo", "id", "ln", "ls", "mkdir", "mv", "rm", "rmdir", "touch", "true")
QUICK = ("-processors", "1", "-noI", "-noD", "-noF", "-noX")
ARCHITECTURE = MACHINES.get(platform.machine(), platform.machine())
Entry = tuple[str, Any]
"""A member's name, and its text, None (a folder), ("link" | "hard", target) or a tarfile type."""


def small_system(folder: Path) -> Path:
    """bash, some of coreutils and what they load: no Python, no /etc, and a file that says what it is."""
    for program in PROGRAMS:
        found = Path("/usr/bin", program)
        copied = folder / "usr/bin" / program
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(found, copied)
        said = subprocess.run(["ldd", str(found)], capture_output=True, text=True, check=True).stdout
        for library in (word for word in said.split() if word.startswith("/")):
            target = folder / os.path.realpath(os.path.dirname(library)).lstrip("/") / os.path.basename(library)
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                shutil.copy(library, target)
    for name in ("bin", "lib", "lib64"):
        if Path("/", name).is_symlink():
            (folder / name).symlink_to(f"usr/{name}")
    for name in ("tmp", "root", "etc"):
        (folder / name).mkdir()
    (folder / "usr/bin/sh").symlink_to("bash")
    (folder / "etc/which-system").write_text("small\n")
    return folder


def layer_of(folder: Path) -> bytes:
    """A folder as a plain layer."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as layer:
        for path in sorted(folder.iterdir()):
            layer.add(path, path.name)
    return stream.getvalue()


def layer(*entries: Entry) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as written:
        for name, what in entries:
            member = tarfile.TarInfo(name)
            member.mode = 0o755
            data = b""
            if what is None:
                member.type = tarfile.DIRTYPE
            elif isinstance(what, str):
                data = what.encode()
                member.size = len(data)
            elif isinstance(what, tuple):
                member.type = tarfile.SYMTYPE if what[0] == "link" else tarfile.LNKTYPE
                member.linkname = what[1]
            else:
                member.type = what
            written.addfile(member, io.BytesIO(data))
    return stream.getvalue()


def pack(plain: bytes, how: str) -> bytes:
    if how == "gzip":
        import gzip

        return gzip.compress(plain, 1)
    return pyarrow.compress(plain, "zstd", asbytes=True) if how == "zstd" else plain


def write_oci(
    path: Path,
    layers: Iterable[bytes],
    config: dict[str, Any] | None = None,
    how: str = "gzip",
    entries: list[dict[str, Any]] | None = None,
) -> str:
    """An OCI archive of these layers; its manifest's digest. `entries` go into the index beside the image's own."""
    blobs: dict[str, bytes] = {}

    def blob(data: bytes, kind: str) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        blobs[f"blobs/sha256/{digest}"] = data
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{digest}", "size": len(data)}

    described = [blob(pack(plain, how), f"layer.v1.tar+{how}" if how else "layer.v1.tar") for plain in layers]
    settings = {"architecture": ARCHITECTURE, "os": "linux", "config": config or {}}
    manifest = {"config": blob(json.dumps(settings).encode(), "config.v1+json"), "layers": described}
    entry = blob(json.dumps(manifest).encode(), "manifest.v1+json")
    entry["platform"] = {"os": "linux", "architecture": ARCHITECTURE}
    index = {"schemaVersion": 2, "manifests": [*(entries or []), entry]}
    files = {"oci-layout": b'{"imageLayoutVersion": "1.0.0"}', "index.json": json.dumps(index).encode(), **blobs}
    with tarfile.open(path, "w") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return str(entry["digest"])


def write_squashfs(path: Path, folder: Path) -> None:
    """What `enroot import` writes of `folder`."""
    path.unlink(missing_ok=True)
    subprocess.run(
        ["mksquashfs", str(folder), str(path), "-no-progress", "-quiet", *QUICK], check=True, capture_output=True
    )


def write_sif(path: Path, folder: Path) -> None:
    """A SIF whose primary partition is a squashfs of `folder`."""
    squashed = path.with_suffix(".squashfs")
    write_squashfs(squashed, folder)
    data, start = squashed.read_bytes(), 4096
    header = struct.pack(
        "<32s10s3s3s16s8q", b"#!run\n", b"SIF_MAGIC\0", b"01\0", b"02\0", b"i" * 16, 0, 0, 0, 1, 128, 585, start, 0
    )
    descriptor = struct.pack("<i?IIIqqq", 0x4004, True, 1, 1, 0, start, len(data), len(data)).ljust(201, b"\0")
    descriptor += struct.pack("<ii", 1, 2)
    path.write_bytes((header + descriptor.ljust(585, b"\0")).ljust(start, b"\0") + data)
    squashed.unlink()
