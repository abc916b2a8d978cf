"""Codex CLI (measured on 0.171.0): every call says who it is, and items come back verbatim.

Owns its roles, from the header `x-codex-turn-metadata` (JSON), or from the plain sub-agent headers where it is absent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from gyre.proxy.exchange import Evidence, Request
from gyre.proxy.harness_rules.base import Verbatim, because, first_texts
from gyre.proxy.seen import Seen

_FACTS = ("request_kind", "thread_source", "thread_id", "parent_thread_id", "window_number")


class Codex(Verbatim):
    """See `ThreadRules`."""

    def classify(self, headers: Mapping[str, str], request: Request, seen: Seen) -> Evidence:
        told = _metadata(headers.get("x-codex-turn-metadata", ""))
        agent = headers.get("x-openai-subagent", "")
        parent = told.get("parent_thread_id") or headers.get("x-codex-parent-thread-id", "")
        below = told["thread_source"] == "subagent" if "thread_source" in told else bool(agent or parent)
        kind = told.get("request_kind", "turn")
        role = {
            "turn": "sub-agent" if below else "main",
            "compaction": "sub-agent-summary" if below else "main-summary",
        }
        thread = told.get("thread_id", "")
        caller = seen.caller(first_texts(request)) if below else ""
        return Evidence(
            thread=f"agent-{thread or agent or parent}" if below else "main",
            role=role.get(kind, "auxiliary"),
            why=because(
                *(f"{name} {told[name]}" for name in _FACTS if name in told),
                f"x-openai-subagent {agent}" if agent else "",
                f"x-codex-parent-thread-id {parent}" if parent and "parent_thread_id" not in told else "",
                f"prompt of tool call {caller}" if caller else "",
            ),
        )


def _metadata(text: str) -> dict[str, str]:
    """The metadata's known facts as text; {} for what is not a JSON object."""
    try:
        told = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        told = {}
    if not isinstance(told, dict):
        return {}
    return {name: str(told[name]) for name in _FACTS if isinstance(told.get(name), (str, int))}
