"""Role evidence, one small class a harness: which thread a call belongs to, in which role, and what edits to
expect.

Invariant: a role comes from what the harness sent, never from what we guess it meant; an unlisted edit forks.
"""

from __future__ import annotations

from collections.abc import Mapping

from gyre.errors import UserError
from gyre.proxy.conversation import Conversation, Message
from gyre.proxy.exchange import Evidence, ThreadRules


class Shell:
    """The built-in harness: one conversation, echoed as it was."""

    def classify(self, headers: Mapping[str, str], conversation: Conversation) -> Evidence:
        return Evidence()

    def normal(self, message: Message) -> Message:
        return message


_KNOWN: dict[str, ThreadRules] = {"shell": Shell()}


def rules_for(harness: str) -> ThreadRules:
    """The rules of a harness. Raises UserError if there are none."""
    if harness not in _KNOWN:
        raise UserError(f"harness.name: no thread rules for {harness!r}; known: {', '.join(sorted(_KNOWN))}")
    return _KNOWN[harness]
