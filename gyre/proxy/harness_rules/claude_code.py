"""Claude Code (measured on 2.1.220; the class headers are documented from 2.1.273 on).

Owns its roles and edits. Roles: the class header where there is one; else the web-search helper has one tool, of type
web_search_*; the title call wishes a shaped reply and has no tools; a summary's last user text starts with a marker; an
agent-id header tells sub-agents. Edits: a leading `cd DIR && ` of a Bash command goes, white space at line ends of
written files goes, values are coerced, and input that it cannot read comes back whole under another key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gyre.proxy.conversation import Message, ToolCall
from gyre.proxy.exchange import Evidence, Request
from gyre.proxy.harness_rules.base import Arguments, Verbatim, because, first_texts, with_arguments
from gyre.proxy.seen import Seen

SUMMARY_MARKER = "CRITICAL: Respond with TEXT ONLY"
UNPARSED = "__unparsedToolInput"
_CHANGE_FOLDER = re.compile(r"""\s*cd\s+("[^"]*"|'[^']*'|[^\s;&|"']+)\s*&&\s*""")
_LINE_ENDS = re.compile(r"[ \t]+(?=\n|$)")
_NUMBER = re.compile(r"-?(0|[1-9]\d{0,15})(\.\d{1,15})?([eE][-+]?\d{1,2})?")
_WRITERS = ("Write", "Edit", "MultiEdit", "NotebookEdit")


class ClaudeCode(Verbatim):
    """See `ThreadRules`."""

    def classify(self, headers: Mapping[str, str], request: Request, seen: Seen) -> Evidence:
        agent = headers.get("x-claude-code-agent-id", "")
        role, why = _role(headers.get("x-claude-code-request-class", ""), request, bool(agent))
        parent = headers.get("x-claude-code-parent-agent-id", "")
        caller = seen.caller(first_texts(request)) if agent else ""
        thread = f"agent-{agent}" if agent else "main"
        if role == "auxiliary":
            thread = f"{thread}/auxiliary"
        return Evidence(
            thread=thread,
            role=role,
            why=because(
                why,
                f"agent-id {agent}" if agent else "",
                f"parent-agent-id {parent}" if parent else "",
                f"prompt of tool call {caller}" if caller else "",
                _session(headers, request),
            ),
        )

    def normal(self, message: Message) -> Message:
        return with_arguments(message, _normal)

    def same(self, recorded: Message, echoed: Message) -> bool:
        if any(UNPARSED in call.arguments for call in echoed.calls):
            # What it could not read is ours as it stands; its other calls must be what we recorded.
            ours = {call.id: call for call in recorded.calls}
            calls = tuple(_as_recorded(call, ours) for call in echoed.calls)
            echoed = Message(role="assistant", text=echoed.text, calls=calls)
        return super().same(recorded, echoed)


def _role(kind: str, request: Request, agent: bool) -> tuple[str, str]:
    """(role, why)."""
    whose = "sub-agent" if agent else "main"
    if kind == "auxiliary":
        return "auxiliary", "request-class auxiliary"
    if kind == "compaction":
        return f"{whose}-summary", "request-class compaction"
    if kind in ("main", "subagent", "workflow"):
        return ("main" if kind == "main" else "sub-agent"), f"request-class {kind}"
    hints, tools = request.hints, request.conversation.tools
    if len(hints.server_tools) == 1 and not tools and hints.server_tools[0].startswith("web_search_"):
        return "auxiliary", "web-search helper"
    if not tools and hints.structured:
        return "auxiliary", "shaped reply without tools"
    if hints.last_user and hints.last_user[-1].startswith(SUMMARY_MARKER):
        return f"{whose}-summary", "summary marker"
    return whose, ""


def _session(headers: Mapping[str, str], request: Request) -> str:
    session = headers.get("x-claude-code-session-id") or request.hints.session
    return f"session {session}" if session else ""


def _as_recorded(call: ToolCall, ours: dict[str, ToolCall]) -> ToolCall:
    known = ours.get(call.id)
    return known if known is not None and known.name == call.name and UNPARSED in call.arguments else call


def _normal(name: str, arguments: Arguments) -> Arguments:
    changed = dict(arguments)
    command = changed.get("command")
    if name == "Bash" and isinstance(command, str):
        while (found := _CHANGE_FOLDER.match(command)) is not None:
            command = command[found.end() :]
        changed["command"] = command
    return {key: _coerced(value, name in _WRITERS) for key, value in changed.items()}


def _coerced(value: Any, trimmed: bool) -> Any:
    """One form for all values that may become each other: "false" and false, 1000.0 and 1000."""
    if isinstance(value, dict):
        return {key: _coerced(inner, trimmed) for key, inner in value.items()}
    if isinstance(value, list):
        return [_coerced(inner, trimmed) for inner in value]
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        value = str(value)
    if not isinstance(value, str):
        return value
    if _NUMBER.fullmatch(value):
        number = float(value)
        return str(int(number)) if number.is_integer() else str(number)
    return _LINE_ENDS.sub("", value) if trimmed else value
