"""Reads the part of a Dockerfile that needs no container runtime: FROM, WORKDIR, COPY, ENV and USER.

Owns that reader and the `Environment` that it yields. Invariant: an `Environment` says exactly what the
Dockerfile says, on a base image from the disk or the host's system in its place; an instruction outside the subset is
refused, never skipped, but for those that only describe the image or its own command. No COPY source leaves the
environment folder.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import shlex
from pathlib import Path

from msgspec import Struct, field

from gyre.errors import UserError

SUBSET = "gyre covers FROM, WORKDIR, COPY, ENV and USER"
WITHOUT_EFFECT = ("LABEL", "MAINTAINER", "EXPOSE", "CMD", "ENTRYPOINT", "STOPSIGNAL", "HEALTHCHECK", "SHELL")
"""They describe the image, or its own command and build, in the place of which the harness runs."""


class Copy(Struct, frozen=True):
    """`COPY sources...

    target`: host paths, and an absolute path inside. A target that ends in / is a folder.
    """

    sources: tuple[Path, ...]
    target: str


class Environment(Struct, frozen=True):
    """What a task's root file system has beyond the host's system."""

    image: str = ""
    workdir: str = ""
    folders: tuple[str, ...] = ()
    """Every WORKDIR that occurs: Docker creates it."""
    copies: tuple[Copy, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    user: str = ""
    """The last USER; "": the image's own."""
    refused: str = ""
    """Why nothing but a prebuilt image can be this environment."""


def read_or_refuse(path: Path) -> Environment:
    """`read_dockerfile`, or an environment that says why it cannot be built."""
    try:
        return read_dockerfile(path)
    except UserError as error:
        return Environment(refused=str(error))


def read_dockerfile(path: Path) -> Environment:
    """Parse a Dockerfile of FROM, WORKDIR, COPY, ENV and USER. Raises UserError naming file, line and instruction."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not readable: {error}") from error
    if "\0" in text:
        raise UserError(f"{path}: has a NUL character in it; take it out")
    image, workdir, user = "", "", ""
    folders: list[str] = []
    copies: list[Copy] = []
    env: dict[str, str] = {}
    for number, line in _logical_lines(text):
        word, _, rest = line.partition(" ")
        place, rest = f"{path}:{number}", rest.strip()
        match word.upper():
            case "FROM" if not image:
                image = _image(rest, place)
            case "WORKDIR":
                workdir = posixpath.normpath(posixpath.join(workdir or "/", _plain(rest, place)))
                folders.append(workdir)
            case "COPY":
                copies.append(_copy(rest, place, path.parent, workdir or "/"))
            case "ENV":
                env |= _env(rest, place)
            case "USER":
                user = _plain(rest, place)
            case name if name not in WITHOUT_EFFECT:
                raise UserError(
                    f"{place}: {word} is not covered ({SUBSET}): copy files in, put a prebuilt image of the task into"
                    " sandbox.images, or leave this task out"
                )
    if not image:
        raise UserError(f"{path}: no FROM line; start the file with one (the host's system stands in for the image)")
    return Environment(image=image, workdir=workdir, folders=tuple(folders), copies=tuple(copies), env=env, user=user)


def _logical_lines(text: str) -> list[tuple[int, str]]:
    """(number of the first line, instruction) with continuations joined, comments and blank lines gone."""
    lines: list[tuple[int, str]] = []
    pending, start = "", 0
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        start = start if pending else number
        pending = f"{pending} {line}".strip()
        if pending.endswith("\\"):
            pending = pending[:-1].rstrip()
            continue
        lines.append((start, pending))
        pending = ""
    if pending:
        lines.append((start, pending))
    return lines


def _image(rest: str, place: str) -> str:
    words = rest.split()
    if len(words) != 1 or words[0].startswith("--"):
        raise UserError(f"{place}: FROM with options or stages is not covered ({SUBSET})")
    return _plain(words[0], place)


def _plain(text: str, place: str) -> str:
    if not text or "$" in text:
        raise UserError(f"{place}: variables and empty values are not covered ({SUBSET}, with plain paths)")
    return text


def _env(rest: str, place: str) -> dict[str, str]:
    """`NAME=value ...`, or the older `NAME the rest`."""
    name, _, value = rest.partition(" ")
    if "=" not in name:
        return {name: _plain(value.strip(), place)}
    try:
        pairs = [word.partition("=") for word in shlex.split(_plain(rest, place))]
    except ValueError as error:
        raise UserError(f"{place}: ENV is not readable: {error}") from error
    if not all(name and equals for name, equals, _ in pairs):
        raise UserError(f"{place}: ENV needs NAME=value")
    return {name: value for name, _, value in pairs}


def _copy(rest: str, place: str, context: Path, workdir: str) -> Copy:
    if rest.startswith("["):
        try:
            words = json.loads(rest)
        except json.JSONDecodeError as error:
            raise UserError(f"{place}: COPY's list is not valid JSON: {error}") from error
    else:
        words = rest.split()
    if len(words) < 2 or not all(isinstance(word, str) for word in words):
        raise UserError(f"{place}: COPY needs a source and a target")
    if words[0].startswith("--") or re.search(r"[*?\[]", " ".join(words[:-1])):
        raise UserError(f"{place}: COPY with options or wildcards is not covered; name the files")
    target = posixpath.normpath(posixpath.join(workdir, _plain(words[-1], place)))
    if words[-1].endswith("/") or words[-1] == "." or len(words) > 2:
        target = target.rstrip("/") + "/"
    return Copy(tuple(_source(context, word, place) for word in words[:-1]), target)


def _source(context: Path, name: str, place: str) -> Path:
    # Path.resolve raises for a link to itself.
    source = Path(os.path.realpath(context / _plain(name, place).lstrip("/")))
    if not source.is_relative_to(os.path.realpath(context)):
        raise UserError(f"{place}: COPY source {name!r} lies outside the environment folder")
    if not source.exists():
        raise UserError(f"{place}: COPY source {name!r} does not exist in {context}")
    return source
