"""From a TOML file and `--set` overrides to a Recipe.

Owns reading, overriding, and errors that name file, line and key. Invariant: a recipe that is returned is complete,
has absolute paths, and passed `check_recipe`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from gyre.errors import UserError
from gyre.recipe.check import check_folders, check_recipe
from gyre.recipe.keys import Key, choices, duration_keys, is_text, line_of, nearest_key, unknown_keys
from gyre.recipe.schema import Recipe
from gyre.recipe.toml import dump_toml
from gyre.recipe.units import parse_seconds

__all__ = ["dump_toml", "load_recipe"]

_PATHS: tuple[Key, ...] = (
    ("model", "path"),
    ("model", "build"),
    ("tasks", "path"),
    ("eval", "path"),
    ("sandbox", "images"),
    ("rollout", "python"),
)
_AT = re.compile(r"(?P<what>.*) - at `\$\.?(?P<key>.*)`", re.DOTALL)
_INDEX = re.compile(r"\[.*?\]")


class _Source:
    """Where each key was set: for the words in front of an error."""

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self.text = text
        self.overridden: list[Key] = []

    def error(self, key: Key, message: str) -> UserError:
        if any(key[: len(done)] == done for done in self.overridden):
            place = "--set"
        else:
            line = line_of(self.text, key)
            place = f"{self.path} line {line}" if line else str(self.path)
        name = ".".join(key)
        return UserError(f"{place}: {name}: {message}" if name else f"{place}: {message}")


def load_recipe(
    path: Path | str, overrides: Sequence[str] = (), *, folders: bool = True, local: bool | None = None
) -> Recipe:
    """Reads the recipe at `path`, applies overrides ("train.steps=3"), resolves and checks it.

    Relative paths, those of overrides too, start at the recipe's folder. `folders=False` skips looking whether
    folders and files exist (a recipe of another machine). `local` says whether one machine runs it
    (`submit --local`), which decides how many workers there are; None (a frozen recipe): whichever has more.
    Raises UserError.
    """
    path = Path(path)
    source, table = _read(path)
    for override in overrides:
        source.overridden.append(_override(table, override))
    for key in unknown_keys(table):
        near = nearest_key(key)
        raise source.error(key, "unknown key" + (f": did you mean {near}?" if near else ""))
    _durations(table, source)
    _resolve(table, path.absolute().parent)
    recipe = _convert(table, source)
    if problem := check_recipe(recipe, local):
        raise source.error(*problem)
    if folders and (problem := check_folders(recipe)):
        raise source.error(*problem)
    return recipe


def _read(path: Path) -> tuple[_Source, dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read the recipe {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"cannot read the recipe {path}: it is not UTF-8 text") from None
    try:
        return _Source(path, text), tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not TOML: {error}") from None


def _override(table: dict[str, Any], override: str) -> Key:
    """Sets one "a.b=value" in the table. The value is TOML, else the bare string."""
    dotted, equals, value = override.partition("=")
    key = tuple(part.strip() for part in dotted.split("."))
    if not equals or not all(key):
        raise UserError(f"--set {override}: expected key=value, such as train.steps=3")
    inner = table
    for part in key[:-1]:
        inner = inner.setdefault(part, {})
        if not isinstance(inner, dict):
            raise UserError(f"--set {override}: {part} is a value, not a table")
    inner[key[-1]] = _toml_value(value.strip(), is_text(key))
    return key


def _toml_value(text: str, wants_text: bool) -> Any:
    """A TOML value, else the bare string. A key of text takes 2.1 and true as they stand."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = parsed["value"]
    return text if len(parsed) > 1 or (wants_text and not isinstance(value, str)) else value


def _get(table: Any, key: Key) -> Any:
    for part in key:
        if not isinstance(table, dict) or part not in table:
            return None
        table = table[part]
    return table


def _put(table: dict[str, Any], key: Key, value: Any) -> None:
    for part in key[:-1]:
        table = table[part]
    table[key[-1]] = value


def _durations(table: dict[str, Any], source: _Source) -> None:
    for key in sorted(duration_keys()):
        value = _get(table, key)
        if value is not None:
            try:
                _put(table, key, parse_seconds(value))
            except ValueError as error:
                raise source.error(key, str(error)) from None


def _resolve(table: dict[str, Any], folder: Path) -> None:
    """Makes paths absolute. Links are kept: an interpreter of a virtual environment is one."""
    for key in _PATHS:
        value = _get(table, key)
        if isinstance(value, str) and value:
            _put(table, key, str(_clean(folder / Path(value).expanduser())))


def _clean(path: Path) -> Path:
    parts: list[str] = []
    for part in path.parts:
        if part == ".." and len(parts) > 1:
            parts.pop()
        else:
            parts.append(part)
    return Path(*parts)


def _convert(table: dict[str, Any], source: _Source) -> Recipe:
    try:
        return msgspec.convert(table, Recipe)
    except msgspec.ValidationError as error:
        match = _AT.fullmatch(str(error))
        what = match["what"] if match else str(error)
        key = tuple(part for part in _INDEX.sub("", match["key"]).split(".") if part) if match else ()
        if allowed := choices(key):
            what = f"{what.replace('enum ', '')}: use one of {', '.join(allowed)}"
        if missing := re.fullmatch(r"Object missing required field `(\w+)`", what):
            raise source.error((*key, missing[1]), "this key is required") from None
        raise source.error(key, what.replace("`", "").replace("Expected", "expected")) from None
