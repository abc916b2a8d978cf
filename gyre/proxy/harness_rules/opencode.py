"""OpenCode (measured on 1.18): a header names the session, another one the parent's session.

Owns its roles and edits. Roles: the title call has no tools and the small model; a summary has no tools and one user's
message, the transcript. Edits: a call of an unknown tool comes back as a call of `invalid`, with our id.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from gyre.proxy.conversation import Message
from gyre.proxy.exchange import Evidence, Request
from gyre.proxy.harness_rules.base import Verbatim, because, first_texts
from gyre.proxy.seen import Seen

INVALID = "invalid"
SMALL_MODEL = "-small"
"""Suffix of the model's name for side calls, as our launch configures it."""


class OpenCode(Verbatim):
    """See `ThreadRules`."""

    def classify(self, headers: Mapping[str, str], request: Request, seen: Seen) -> Evidence:
        session, parent = headers.get("x-session-id", ""), headers.get("x-parent-session-id", "")
        whose, thread = ("sub-agent", f"agent-{session}") if parent else ("main", "main")
        facts = [f"session {session}" if session else "", f"parent session {parent}" if parent else ""]
        if request.model.endswith(SMALL_MODEL) and not request.conversation.tools:
            return Evidence(thread=f"{thread}/title", role="auxiliary", why=because("small model, no tools", *facts))
        if not request.conversation.tools:
            return Evidence(thread=f"{thread}/summary", role=f"{whose}-summary", why=because("no tools", *facts))
        caller = seen.caller(first_texts(request)) if parent else ""
        facts.append(f"prompt of tool call {caller}" if caller else "")
        return Evidence(thread=thread, role=whose, why=because(*facts))

    def same(self, recorded: Message, echoed: Message) -> bool:
        ours = {call.id: call for call in recorded.calls}
        calls = tuple(ours.get(call.id, call) if call.name == INVALID else call for call in echoed.calls)
        return super().same(recorded, msgspec.structs.replace(echoed, calls=calls))
