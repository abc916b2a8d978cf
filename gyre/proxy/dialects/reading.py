"""What all dialects need to read a body: JSON objects, typed fields, tool results in the order of their calls.

Invariant: whatever the bytes are, the outcome is a value of the asked type or a Refusal that names the field.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from gyre.proxy.conversation import Message
from gyre.proxy.exchange import Refusal

T = TypeVar("T")


def json_object(body: bytes) -> dict[str, Any]:
    """The body as a JSON object. Raises Refusal."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Refusal("invalid", f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise Refusal("invalid", "the body is not a JSON object")
    return value


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


def in_call_order(messages: Sequence[Message]) -> tuple[Message, ...]:
    """`messages` with each round's tool results in the order of its calls.

    Harnesses send the results of parallel calls as they complete, and name the calls by id; templates name them by
    place alone. Results of calls that are not in the round stay behind them.
    """
    ordered: list[Message] = []
    calls: dict[str, int] = {}
    start = 0
    for message in [*messages, None]:
        if message is not None and message.role == "tool":
            ordered.append(message)
            continue
        ordered[start:] = sorted(ordered[start:], key=lambda result: calls.get(result.call_id, len(calls)))
        if message is None:
            break
        ordered.append(message)
        start = len(ordered)
        calls = {call.id: index for index, call in enumerate(message.calls)} if message.role == "assistant" else {}
    return tuple(ordered)
