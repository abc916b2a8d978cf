"""Lays one layer of an image, a tar stream, over a folder.

Owns the rules of layers: later ones replace, whiteouts (`.wh.NAME`, `.wh..wh..opq`) hide what lower layers have.
Invariants: nothing is written outside the folder, whatever names and links a layer holds: links in it are followed as
below a root of their own, and a name that is absolute or climbs above the root is refused; no device and no set-user-id
bit comes out of a layer, and everything in it belongs to this user.
"""

from __future__ import annotations

import os
import posixpath
import shutil
import tarfile
from pathlib import Path

from gyre.executions.layers import remove_tree

WHITEOUT = ".wh."
OPAQUE = ".wh..wh..opq"
MOST_LINKS = 40


class ImageError(Exception):
    """An image that cannot be used. The message is one line and names the member or the blob."""


def unpack_layer(layer: tarfile.TarFile, root: Path) -> None:
    """Apply all members of `layer` to `root` in their order. Raises ImageError; tarfile.TarError, OSError."""
    made: set[str] = set()
    """Of this very layer: its whiteouts hide only what lower ones have."""
    for member in layer:
        name = plain_name(member.name)
        folder, base = posixpath.split(name)
        if base == OPAQUE:
            _empty(_inside(root, folder, member.name), made, root)
        elif base.startswith(WHITEOUT):
            hidden = plain_name(base.removeprefix(WHITEOUT))
            if not hidden:
                raise ImageError(f"member {member.name!r}: a whiteout of nothing")
            if str(place := _inside(root, folder, member.name) / hidden) not in made:
                remove_tree(place)
        elif name:
            place = _inside(root, folder, member.name) / base
            _extract(layer, member, place, root)
            made.update(_with_parents(place, root))


def plain_name(name: str) -> str:
    """A member's name as a relative path without `.` and `..`; "" is the root itself. Raises ImageError."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise ImageError(f"member {name!r}: an absolute name, or one with .., leaves the image")
    return "/".join(parts)


def _with_parents(place: Path, root: Path) -> list[str]:
    return [str(place), *(str(parent) for parent in place.parents if parent.is_relative_to(root))]


def _inside(root: Path, folder: str, member: str) -> Path:
    """The real folder that `folder` names in `root`, made if need be; links are followed with `root` as /."""
    pending = folder.split("/") if folder else []
    place, links = root, 0
    while pending:
        part = pending.pop(0)
        if part == "..":
            if place == root:
                raise ImageError(f"member {member!r}: it goes through a link that climbs above the image's root")
            place = place.parent
        elif part not in ("", "."):
            there = place / part
            if there.is_symlink():
                links += 1
                if links > MOST_LINKS:
                    raise ImageError(f"member {member!r}: it goes through a loop of links")
                target = os.readlink(there)
                place = root if target.startswith("/") else place
                pending[:0] = target.split("/")
            else:
                if there.exists() and not there.is_dir():
                    there.unlink()
                there.mkdir(mode=0o755, exist_ok=True)
                place = there
    return place


def _empty(folder: Path, made: set[str], root: Path) -> None:
    """Hide what lower layers have in `folder`; what this layer made there stays."""
    for entry in folder.iterdir():
        if str(entry) not in made:
            remove_tree(entry)
        elif entry.is_dir() and not entry.is_symlink():
            _empty(entry, made, root)


def _extract(layer: tarfile.TarFile, member: tarfile.TarInfo, place: Path, root: Path) -> None:
    if member.isdir():
        if place.is_symlink() or not place.is_dir():
            remove_tree(place)
            place.mkdir()
        place.chmod(member.mode & 0o1777 | 0o700)
        return
    if not (member.isreg() or member.issym() or member.islnk()):
        if place.is_relative_to(root / "dev"):
            return  # a sandbox has a /dev of its own
        raise ImageError(f"member {member.name!r}: devices and pipes are refused")
    linked = _hard_link_target(member, root) if member.islnk() else None
    if linked == place:
        return
    remove_tree(place)
    if member.issym():
        place.symlink_to(member.linkname)
    elif linked is not None:
        os.link(linked, place)
    else:
        source = layer.extractfile(member)
        with open(place, "xb") as target:
            if source is not None:
                shutil.copyfileobj(source, target, 1 << 20)
        place.chmod(member.mode & 0o777 | 0o400)
        os.utime(place, (member.mtime, member.mtime))


def _hard_link_target(member: tarfile.TarInfo, root: Path) -> Path:
    folder, base = posixpath.split(plain_name(member.linkname))
    target = _inside(root, folder, member.name) / base
    if target.is_symlink() or not target.is_file():
        raise ImageError(f"member {member.name!r}: a hard link to {member.linkname!r}, which is no file of the image")
    return target
