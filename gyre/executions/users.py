"""Users other than root in a sandbox: who they are, and what of the root file system is theirs to write.

Owns `User`, its reading from passwd and group, and the layers of a root file system that is read-only but for a few
places. Invariants: outside those places nothing can be written, whoever owns it (a sandbox has one real user, so owners
alone would hold nothing); a user is looked up below what an execution wrote; no link in a layer is followed.
"""

from __future__ import annotations

import os
import posixpath
import stat
from pathlib import Path

from msgspec import Struct

from gyre.errors import UserError

ROOT = ("", "root", "0")
SHARED = ("/tmp", "/var/tmp", "/logs/agent", "/logs/artifacts")
"""Everybody's to write."""
MOUNT_POINTS = ("proc", "dev", "run", "root")
MOST = 2**31


class User(Struct, frozen=True):
    """One who is not root. `line`: what the host's passwd says of it, where the sandbox's own says nothing."""

    uid: int
    gid: int
    name: str = ""
    home: str = "/"
    line: str = ""


def find_user(wanted: str, lowers: tuple[Path, ...], on_image: bool) -> User | None:
    """Who `wanted` is (`NAME`, `UID`, `NAME:GROUP`, `UID:GID`, as in a Dockerfile's USER) by the passwd and group of
    `lowers`, and on the host's own system by the host's; None: root.

    Raises UserError for a name that is in neither. A number needs no entry: its group is 0 then, and its home is /.
    """
    who, _, group = wanted.partition(":")
    if who in ROOT:
        return None
    tables = [_table(lowers, "passwd"), *([] if on_image else [_lines(Path("/etc/passwd"))])]
    for table in tables:
        for fields in table:
            if len(fields) >= 7 and (fields[2] == who if who.isdigit() else fields[0] == who):
                home = posixpath.normpath(fields[5]) if fields[5].startswith("/") else "/"
                own = _number(fields[3], wanted)
                line = ":".join(fields) if table is not tables[0] else ""
                gid = _group(group, lowers, on_image, wanted) if group else own
                return User(_number(fields[2], wanted), gid, fields[0], home, line)
    if not who.isdigit():
        raise UserError(
            f"user {wanted!r} is not in the image's /etc/passwd: name one that is, or its number"
            if on_image
            else f"user {wanted!r} is not in this machine's /etc/passwd (there is no image): give its number,"
            " or put the task's image into sandbox.images"
        )
    return User(_number(who, wanted), _group(group, lowers, on_image, wanted) if group else 0)


def writable_places(user: User, workdir: str) -> tuple[str, ...]:
    """The folders that `user` may write, none below another; never the root itself."""
    places = sorted({posixpath.normpath(place) for place in (workdir, user.home, *SHARED)} - {"/"})
    return tuple(place for place in places if not any(place.startswith(f"{other}/") for other in places))


def user_layer(folder: Path, user: User, places: tuple[str, ...], targets: dict[str, bool], base: Path) -> Path:
    """The topmost layer of a sandbox of `user`, in the new `folder`: its places, what is mounted (`targets`: paths
    inside, whether they are folders), and its line in the passwd of the layer `base`. Raises OSError.
    """
    for name in (*MOUNT_POINTS, *(place.lstrip("/") for place in places)):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for target, is_folder in targets.items():
        inside = folder / target.lstrip("/")
        (inside if is_folder else inside.parent).mkdir(parents=True, exist_ok=True)
        if not is_folder:
            inside.touch()
    if user.line:
        (folder / "etc").mkdir(exist_ok=True)
        (folder / "etc/passwd").write_text((base / "etc/passwd").read_text() + f"{user.line}\n")
    return folder


def layers_of(place: str, lowers: tuple[Path, ...]) -> list[Path]:
    """The folders that merge to `place` in an overlay of `lowers`, the lowest first: what is no folder (a link, a file,
    a deletion) in one layer hides the layers below it, and so does an opaque folder."""
    found: list[Path] = []
    for layer in reversed(lowers):
        path, hides, there = layer, False, True
        for part in place.strip("/").split("/"):
            path /= part
            try:
                mode = path.lstat().st_mode
            except FileNotFoundError:
                there = False
                break
            if not stat.S_ISDIR(mode):
                there, hides = False, True
                break
            hides = hides or _opaque(path)
        if there:
            found.append(path)
        if hides:
            break
    return found[::-1]


def _opaque(folder: Path) -> bool:
    try:
        return os.getxattr(folder, "user.overlay.opaque", follow_symlinks=False) == b"y"
    except OSError:
        return False


def _table(lowers: tuple[Path, ...], name: str) -> list[list[str]]:
    """The lines of /etc/`name` in the topmost of `lowers` that has it."""
    for layer in reversed(lowers):
        if (file := layer / "etc" / name).exists() or file.is_symlink():
            return [] if file.is_symlink() or file.parent.is_symlink() else _lines(file)
    return []


def _lines(file: Path) -> list[list[str]]:
    try:
        return [line.split(":") for line in file.read_text(errors="replace").splitlines()]
    except OSError:
        return []


def _group(group: str, lowers: tuple[Path, ...], on_image: bool, wanted: str) -> int:
    if group.isdigit():
        return _number(group, wanted)
    for fields in [*_table(lowers, "group"), *([] if on_image else _lines(Path("/etc/group")))]:
        if len(fields) >= 3 and fields[0] == group:
            return _number(fields[2], wanted)
    raise UserError(f"user {wanted!r}: its group is not in /etc/group: name one that is, or its number")


def _number(text: str, wanted: str) -> int:
    if not text.isdigit() or int(text) >= MOST:
        raise UserError(f"user {wanted!r}: {text!r} is no number of a user or group")
    return int(text)
