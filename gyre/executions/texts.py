"""What no command line and no environment of a process can hold, found in a task before anything runs.

Owns that look at a `Task`. Invariant: no text of a task that passes ends an argument early (a NUL would, and what
follows would be read as the sandbox's own option), and every variable has a name that one can have.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from msgspec import Struct

from gyre.errors import UserError

if TYPE_CHECKING:
    from gyre.executions.tasks import Task


def refuse_texts(task: Task) -> None:
    """Raises UserError for the first text of `task`, its steps and its verifiers that no process can be given."""
    for key, text, is_name in _texts(task, ""):
        if what := _fault(text, is_name):
            raise UserError(f"{task.folder}: {key}{f': {text!r}' if is_name else ''} {what}")


def _fault(text: str, is_name: bool) -> str:
    if "\0" in text:
        return "has a NUL character in it; take it out"
    if is_name and (not text or "=" in text):
        return "cannot be the name of a variable"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "is no Unicode text"
    return ""


def _texts(value: object, key: str) -> Iterator[tuple[str, str, bool]]:
    """(where it stands, text, is it a variable's name) of every text below `value`."""
    if isinstance(value, str):
        yield key, value, False
    elif isinstance(value, dict):
        for name, item in value.items():
            yield key, name, key.endswith("env")
            yield from _texts(item, f"{key}.{name}")
    elif isinstance(value, tuple):
        for item in value:
            yield from _texts(item, key)
    elif isinstance(value, Struct):
        for name in value.__struct_fields__:
            yield from _texts(getattr(value, name), f"{key}.{name}".lstrip("."))
