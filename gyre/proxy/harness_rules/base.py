"""Rules of a harness that keeps what it is given, and what other rules are built of.

Invariant: `same` is never looser than the listed edits of its harness, for it puts recorded tokens in place of what
the harness sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from gyre.proxy.conversation import Message, ToolCall, visible
from gyre.proxy.exchange import Evidence, Request
from gyre.proxy.seen import Seen

Arguments = dict[str, Any]
_FIRST = 6


class Verbatim:
    """One conversation, echoed as it was (but for spelling, which no chain sees)."""

    def classify(self, headers: Mapping[str, str], request: Request, seen: Seen) -> Evidence:
        return Evidence()

    def normal(self, message: Message) -> Message:
        return message

    def same(self, recorded: Message, echoed: Message) -> bool:
        return visible(self.normal(recorded)) == visible(self.normal(echoed))


def first_texts(request: Request) -> tuple[str, ...]:
    """The user's first texts, in whatever dialect: some harnesses tell their surroundings before the prompt."""
    users = [message.text for message in request.conversation.messages[:_FIRST] if message.role == "user"]
    return (*request.hints.first_user, *users)


def because(*facts: str) -> str:
    """The facts that hold, in one line."""
    return "; ".join(fact for fact in facts if fact)


def with_arguments(message: Message, change: Callable[[str, Arguments], Arguments]) -> Message:
    """`message` with `change(name, arguments)` as the arguments of each call whose arguments are an object."""
    if not message.calls:
        return message
    calls = []
    for call in message.calls:
        try:
            arguments = json.loads(call.arguments)
        except (ValueError, RecursionError):
            arguments = None
        if isinstance(arguments, dict):
            call = ToolCall(call.id, call.name, json.dumps(change(call.name, arguments)))
        calls.append(call)
    return msgspec.structs.replace(message, calls=tuple(calls))
