"""Claude Code: how it is started headless, offline, and with timeouts that outlast a held generation.

Every variable was measured on 2.1.220. Invariant: all its models are the one model, so every call is the policy's.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

from gyre.executions.harnesses import LaunchRequest
from gyre.executions.harnesses.install import INSIDE
from gyre.executions.harnesses.packaged import Packaged, found_inside
from gyre.executions.transcripts import Told, json_lines

ISSUED = "msg_"
"""Begins the ids of our replies; it makes up others for messages of its own."""
_HOUR = "3600000"
_MACHINES = {"x86_64": "x64", "aarch64": "arm64"}


class ClaudeCodeHarness(Packaged):
    """See `Harness`."""

    name = "claude-code"
    dialect = "anthropic"

    def argv(self, request: LaunchRequest, folder: Path) -> tuple[str, ...]:
        machine = _MACHINES.get(platform.machine(), platform.machine())
        binary = found_inside(folder, f"node_modules/@anthropic-ai/claude-code-linux-{machine}/claude", INSIDE)
        shape = ("--output-format", "stream-json", "--verbose", "--max-turns", str(request.max_turns))
        offline = ("--dangerously-skip-permissions", "--disallowedTools", "WebFetch,WebSearch")
        return (binary, "-p", request.task.instruction, *shape, *offline)

    def environment(self, request: LaunchRequest) -> dict[str, str]:
        pinned = {
            # Exactly 1, else root is refused.
            "IS_SANDBOX": "1",
            "ANTHROPIC_BASE_URL": f"http://127.0.0.1:{request.port}",
            "ANTHROPIC_AUTH_TOKEN": request.key,
            "ANTHROPIC_MODEL": request.model,
            "ANTHROPIC_SMALL_FAST_MODEL": request.model,
            # Otherwise an explorer asks for another model's name.
            "CLAUDE_CODE_SUBAGENT_MODEL": request.model,
            # Its billing line would part equal histories.
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            # Newer versions say the class of a call in a header.
            "CLAUDE_CODE_GATEWAY_HINT_HEADERS": "1",
            "DISABLE_TELEMETRY": "1",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            # A generation is held until it is whole: nothing may time out before.
            "API_TIMEOUT_MS": _HOUR,
            "API_FORCE_IDLE_TIMEOUT": "0",
            "CLAUDE_STREAM_IDLE_TIMEOUT_MS": _HOUR,
        }
        if request.max_tokens:
            pinned["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(request.max_tokens)
        return pinned

    def transcript(self, snapshot: Path, log: Path) -> Told | None:
        """Its output: the messages of all agents, without summaries, and at the end the tokens of all calls."""
        messages: set[str] = set()
        usage: dict[str, Any] | None = None
        for line in json_lines(log):
            if line.get("type") == "assistant" and str(line["message"]["id"]).startswith(ISSUED):
                messages.add(line["message"]["id"])
            elif line.get("type") == "result":
                usage = line["modelUsage"]
        if usage is None:
            return None
        tokens = sum(int(model["outputTokens"]) for model in usage.values())
        return Told(calls=len(messages), tokens=tokens, call_roles=("main", "sub-agent"))
