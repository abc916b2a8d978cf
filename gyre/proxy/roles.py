"""Which rules go with which harness: threads, roles, and the edits to expect (see `harness_rules/`).

Invariant: a role comes from what the harness sent, never from what we guess it meant; an unlisted edit forks.
"""

from __future__ import annotations

from gyre.proxy.exchange import ThreadRules
from gyre.proxy.harness_rules.base import Verbatim
from gyre.proxy.harness_rules.claude_code import ClaudeCode
from gyre.proxy.harness_rules.codex import Codex
from gyre.proxy.harness_rules.opencode import OpenCode
from gyre.proxy.harness_rules.qwen_code import QwenCode

_KNOWN: dict[str, ThreadRules] = {
    "shell": Verbatim(),
    "claude-code": ClaudeCode(),
    "codex": Codex(),
    "mini-swe-agent": Verbatim(),
    "opencode": OpenCode(),
    "qwen-code": QwenCode(),
}


def rules_for(harness: str) -> ThreadRules:
    """The rules of a harness; of one that another package offers, nothing is known: every message counts as sent."""
    return _KNOWN.get(harness, Verbatim())
