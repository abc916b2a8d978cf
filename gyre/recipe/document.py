"""The page of recipe keys, made from the schema: `python -m gyre.recipe.document > docs/recipe.md`.

Invariant: the page says what the schema says; a test compares them.
"""

from __future__ import annotations

import ast
import inspect
from typing import Any

import msgspec

from gyre.recipe import schema

HEAD = """# The recipe

A recipe is a TOML file. `gyre submit RECIPE --dry-run` prints it resolved, with every default; `--set table.key=value`
overrides a key. Durations are seconds, or strings such as "90s", "10m", "2h". Unknown keys are refused with the nearest
known one, and impossible combinations with key and reason, before anything starts. `recipes/quickstart.toml` explains
its choices.

This page is printed by `python -m gyre.recipe.document`.
"""


def page() -> str:
    notes = attribute_docstrings()
    lines = [HEAD, "| key | default | what |", "|---|---|---|"]
    for field in msgspec.structs.fields(schema.Recipe):
        if not _is_table(field.type):
            lines.append(_row(field.name, field, notes.get(("Recipe", field.name), "")))
    for field in msgspec.structs.fields(schema.Recipe):
        if _is_table(field.type):
            lines += ["", f"## [{field.name}]", "", "| key | default | what |", "|---|---|---|"]
            for key in msgspec.structs.fields(field.type):
                lines.append(_row(key.name, key, notes.get((field.type.__name__, key.name), "")))
    return "\n".join(lines) + "\n"


def _is_table(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _row(name: str, field: msgspec.structs.FieldInfo, note: str) -> str:
    if field.default is not msgspec.NODEFAULT:
        default = msgspec.json.encode(field.default).decode()
    elif field.default_factory is not msgspec.NODEFAULT:
        made = field.default_factory()
        default = "" if isinstance(made, msgspec.Struct) else msgspec.json.encode(made).decode()
    else:
        default = "required"
    return f"| `{name}` | {default} | {note} |"


def attribute_docstrings() -> dict[tuple[str, str], str]:
    """(class, attribute) -> the string that follows the attribute in the schema."""
    found: dict[tuple[str, str], str] = {}
    for node in ast.parse(inspect.getsource(schema)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        before = ""
        for item in node.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                before = item.target.id
            elif isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant) and before:
                found[node.name, before] = " ".join(str(item.value.value).split())
    return found


if __name__ == "__main__":
    print(page(), end="")
