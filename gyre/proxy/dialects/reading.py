"""What all dialects need to read a value: typed fields and lists of objects.

Invariant: whatever the value is, the outcome is a value of the asked type or a Refusal that names the field.
"""

from __future__ import annotations

from typing import Any, TypeVar

from gyre.proxy.exchange import Refusal

T = TypeVar("T")


def optional(value: dict[str, Any], name: str, kind: type[T], default: T, where: str = "") -> T:
    """Field `name`, or `default` where it is absent or null. Raises Refusal for another type."""
    found = value.get(name)
    if found is None:
        return default
    # A JSON true is no number.
    if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
        raise Refusal("invalid", f"{where}{name}: {kind.__name__} is needed")
    return found


def listed(value: dict[str, Any], name: str, where: str = "") -> list[dict[str, Any]]:
    """Field `name` as a list of objects; [] where it is absent. Raises Refusal."""
    found: list[Any] = optional(value, name, list, [], where)
    for index, entry in enumerate(found):
        if not isinstance(entry, dict):
            raise Refusal("invalid", f"{where}{name}.{index}: an object is needed")
    return found


def positive(value: dict[str, Any], name: str) -> int | None:
    """Field `name` as a number of at least 1, or None. Raises Refusal."""
    found = optional(value, name, int, 0) if value.get(name) is not None else None
    if found is not None and found < 1:
        raise Refusal("invalid", f"{name}: a positive number is needed")
    return found
