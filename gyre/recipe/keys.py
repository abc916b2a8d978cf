"""Keys of the recipe: which there are, which is nearest to a wrong one, and in which line of the file one stands.

Owns the walk over the schema. Pure.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from gyre.recipe.schema import Recipe

Key = tuple[str, ...]


@cache
def hints(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """Field -> type of a struct of the schema."""
    return get_type_hints(struct)


def is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def known_keys(struct: type[msgspec.Struct] = Recipe, prefix: Key = ()) -> Iterator[tuple[Key, Any, bool]]:
    """(key, type, whether it is a duration) of every field, tables included."""
    for name, kind in hints(struct).items():
        yield (*prefix, name), kind, struct.__annotations__[name] == "Seconds"
        if is_struct(kind):
            yield from known_keys(kind, (*prefix, name))


@cache
def schema_keys() -> dict[Key, Any]:
    return {key: kind for key, kind, _ in known_keys()}


@cache
def duration_keys() -> frozenset[Key]:
    return frozenset(key for key, _, duration in known_keys() if duration)


def unknown_keys(table: dict[str, Any], struct: type[msgspec.Struct] = Recipe, prefix: Key = ()) -> Iterator[Key]:
    """Keys of a decoded TOML table that the schema does not have."""
    for name, value in table.items():
        kind = hints(struct).get(name)
        if kind is None:
            yield (*prefix, name)
        elif is_struct(kind) and isinstance(value, dict):
            yield from unknown_keys(value, kind, (*prefix, name))


def nearest_key(key: Key) -> str | None:
    """The known key that was probably meant: a misspelt sibling, the same name elsewhere, or one that looks like it."""
    siblings = [known[-1] for known in schema_keys() if known[:-1] == key[:-1]]
    elsewhere = [".".join(known) for known in schema_keys() if known[-1] == key[-1]]
    if close := difflib.get_close_matches(key[-1], siblings, n=1, cutoff=0.8):
        return ".".join((*key[:-1], close[0]))
    if elsewhere:
        return elsewhere[0]
    if close := difflib.get_close_matches(key[-1], siblings, n=1):
        return ".".join((*key[:-1], close[0]))
    close = difflib.get_close_matches(".".join(key), [".".join(known) for known in schema_keys()], n=1)
    return close[0] if close else None


def is_text(key: Key) -> bool:
    """Whether the key, or the table of free names that it is in, holds strings."""
    return schema_keys().get(key) is str or schema_keys().get(key[:-1]) == dict[str, str]


def choices(key: Key) -> tuple[str, ...]:
    """The values that a key may have, when they are a closed list; of one entry for a list of such."""
    kind = schema_keys().get(key)
    if get_origin(kind) is list:
        kind = get_args(kind)[0]
    return get_args(kind) if get_origin(kind) is Literal else ()


_HEADER = re.compile(r"^\s*\[\s*([^\[\]]+?)\s*\]\s*(?:#.*)?$")
_ASSIGN = re.compile(r"^\s*([A-Za-z0-9_.\"'\- ]+?)\s*=")


def _split(dotted: str) -> Key:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))


def line_of(text: str, key: Key) -> int | None:
    """The line (from 1) of a TOML text that sets `key`, or else the one of the table that it stands in.

    By the look of lines, not by parsing: good enough to point at a place, never used for more.
    """
    table: Key = ()
    best: tuple[int, int] | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        if match := _HEADER.match(line):
            table = _split(match[1])
            found = table
        elif match := _ASSIGN.match(line):
            found = table + _split(match[1])
        else:
            continue
        if key[: len(found)] == found and (best is None or len(found) > best[0]):
            best = (len(found), number)
    return best[1] if best else None
