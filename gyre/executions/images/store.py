"""From an image's name to the root file system that sandboxes lie on.

Owns the folder of images that a recipe names (`sandbox.images`), and CACHE/images/DIGEST, where unpacked ones are kept.
Invariants: an unpacked image appears under its digest only when it is complete and is never written again; of several
builders, in any processes of any machines, one builds and the others wait for it.
"""

from __future__ import annotations

import hashlib
import json
import re
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from msgspec import Struct

from gyre.errors import UserError
from gyre.executions.images.oci import ImageConfig, is_layout, read_oci, unpack_oci
from gyre.executions.images.squashed import unpack_squashed
from gyre.executions.images.unpack import ImageError
from gyre.executions.layers import private_folder, remove_tree
from gyre.ledger.files import alone, renamed_over
from gyre.ledger.layout import cache_home
from gyre.recipe import schema

SUFFIXES = ("", ".tar", ".oci", ".sif", ".sqsh")
SQUASHED = (".sif", ".sqsh")
FAULTS = (ImageError, OSError, tarfile.TarError, EOFError, zlib.error)
"""What a bad or missing image raises while it is read."""
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+@-]*")
Kind = Literal["folder", "oci", "squashed"]


class Image(Struct, frozen=True):
    """One image on disk."""

    path: Path

    @property
    def kind(self) -> Kind:
        if self.path.is_dir():
            return "oci" if is_layout(self.path) else "folder"
        return "squashed" if self.path.suffix in SQUASHED else "oci"

    def config(self) -> ImageConfig:
        """What the image says of its use; nothing, unless it is OCI. Raises UserError."""
        with _named(self.path):
            return read_oci(self.path).config if self.kind == "oci" else ImageConfig()


class Images(Struct, frozen=True):
    """The images of `folder`; None: there are none, and the host's own system stands in for each."""

    folder: Path | None = None

    def find(self, reference: str) -> Image | None:
        """The image of this reference, such as `debian:12` or `org/name:tag`, or None.

        Its file is called like it with `_` for `/` and `:` (or `+`, as enroot calls them); `docker.io/` and `library/`
        may be left out, and so may `latest`.
        """
        for name in _names(reference) if self.folder is not None and reference else ():
            for suffix in SUFFIXES:
                if (path := Path(self.folder or "", name + suffix)).exists():
                    return Image(path.absolute())
        return None


def recipe_images(settings: schema.Sandbox) -> Images:
    """The images that a recipe's `[sandbox]` names."""
    return Images(Path(settings.images) if settings.images else None)


def unpacked(image: Image, cache: Path | None = None) -> Path:
    """The root file system of `image`: a folder as it is, anything else unpacked at the first call.

    Raises UserError that names the image.
    """
    if image.kind == "folder":
        return image.path
    home = private_folder((cache or cache_home()) / "images")
    with _named(image.path):
        root = home / _digest(image, home) / "root"
        if root.is_dir():
            return root
        with alone(home / f".{root.parent.name}.lock"):
            if not root.is_dir():
                _build(image, root.parent)
    return root


def is_unpacked(image: Image, cache: Path | None = None) -> bool:
    """Has `unpacked` nothing left to do? Raises UserError for an image that cannot be read."""
    home = (cache or cache_home()) / "images"
    if image.kind == "folder" or not home.is_dir():
        return image.kind == "folder"
    with _named(image.path):
        return (home / _digest(image, home) / "root").is_dir()


def _names(reference: str) -> Iterator[str]:
    names = [reference, *([reference.removesuffix(":latest")] if ":" in reference else [f"{reference}:latest"])]
    for name in names:
        short = name.removeprefix("docker.io/")
        for spelled in (name, short, short.removeprefix("library/")):
            for mark in "_+":
                if FILE_NAME.fullmatch(file_name := spelled.replace("/", mark).replace(":", mark)):
                    yield file_name


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """What is wrong with an image, as a line that names it."""
    try:
        yield
    except FAULTS as error:
        raise UserError(f"{path}: not a usable image: {' '.join(str(error).split())}", code=1) from error


def _digest(image: Image, home: Path) -> str:
    """`sha256-...`: of an OCI image's manifest, else of the bytes. Remembered by path, size and time of the file."""
    status = (image.path / "index.json" if image.path.is_dir() else image.path).stat()
    known = f"{image.path}\n{status.st_size}\n{status.st_mtime_ns}"
    note = home / f".known-{hashlib.sha256(known.encode()).hexdigest()[:32]}"
    try:
        return str(json.loads(note.read_text())["digest"])
    except (OSError, ValueError, KeyError):
        digest = _read_digest(image)
        with renamed_over(note) as aside:
            aside.write_text(json.dumps({"digest": digest, "of": known}))
        return digest


def _read_digest(image: Image) -> str:
    if image.kind == "oci":
        return read_oci(image.path).digest.replace(":", "-")
    with open(image.path, "rb") as file:
        return "sha256-" + hashlib.file_digest(file, "sha256").hexdigest()


def _build(image: Image, folder: Path) -> None:
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        root = aside / "root"
        root.mkdir()
        if image.kind == "squashed":
            unpack_squashed(image.path, root)
        else:
            unpack_oci(image.path, read_oci(image.path), root)
        root.chmod(0o755)
        aside.rename(folder)
    finally:
        remove_tree(aside)
