"""Qwen Code (measured on 0.15 and 0.24): no header says who calls; system prompt and tools do.

Owns its roles and edits. Roles: the first call's system prompt is the main agent's; a call without tools and with
another system prompt is a summary; any other system prompt is a sub-agent's if a first text is the prompt of a call of
ours; else a side call (so it takes notes on the user). Edits: reasoning is trimmed (no chain sees it), and after a
compression filler text stands beside a call.
"""

from __future__ import annotations

from collections.abc import Mapping

from gyre.proxy.conversation import Message, canonical
from gyre.proxy.exchange import Evidence, Request
from gyre.proxy.harness_rules.base import Verbatim, first_texts
from gyre.proxy.seen import Seen


class QwenCode(Verbatim):
    """See `ThreadRules`."""

    def classify(self, headers: Mapping[str, str], request: Request, seen: Seen) -> Evidence:
        system, tools = request.conversation.system, request.conversation.tools
        if seen.empty:
            return Evidence(why="first call")
        known = seen.thread_of(system)
        if known is not None and known[1] == "main":
            return Evidence(why="system prompt of the first call")
        if not tools:
            return Evidence(thread="main/summary", role="main-summary", why="no tools, a system prompt of its own")
        caller = seen.caller(first_texts(request))
        if not caller:
            return Evidence(thread="main/auxiliary", role="auxiliary", why="another system prompt, no call's prompt")
        return Evidence(
            thread=f"agent-{caller}", role="sub-agent", why=f"another system prompt, prompt of tool call {caller}"
        )

    def same(self, recorded: Message, echoed: Message) -> bool:
        calls = [(call.id, call.name, canonical(call.arguments)) for call in recorded.calls]
        back = [(call.id, call.name, canonical(call.arguments)) for call in echoed.calls]
        # The ids are ours and the calls unchanged: more text around what was said is the compression's filler.
        return bool(calls) and calls == back and recorded.text.strip() in echoed.text
