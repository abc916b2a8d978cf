"""Writing TOML: tomllib only reads. Owns the text of the frozen recipe.

Invariant: what `dump_toml` writes reads back as the same recipe.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from gyre.recipe.schema import Recipe

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def _string(text: str) -> str:
    # JSON's escapes are TOML's, but for DEL; surrogate pairs are avoided by writing characters as they are.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    raise TypeError(f"no TOML for {value!r}")


def _name(key: str) -> str:
    return key if _BARE.fullmatch(key) else _string(key)


def dump_table(table: dict[str, Any], prefix: str = "") -> str:
    """The TOML text of nested tables of strings, numbers, booleans and lists of them."""
    plain = [f"{_name(key)} = {_value(value)}\n" for key, value in table.items() if not isinstance(value, dict)]
    text = "".join(plain)
    for key, value in table.items():
        if isinstance(value, dict):
            dotted = f"{prefix}{_name(key)}"
            text += f"\n[{dotted}]\n{dump_table(value, dotted + '.')}"
    return text


def dump_toml(recipe: Recipe) -> str:
    """The resolved recipe, every key spelled out: what is frozen as RUN/recipe.toml."""
    return dump_table(msgspec.to_builtins(recipe))
