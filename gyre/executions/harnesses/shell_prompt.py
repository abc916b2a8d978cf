"""The fixed text of the `shell` harness: its system prompt and its one tool.

Owns these two constants, which a model may be trained on; nothing else. The agent program carries its own
copy, because it runs alone inside the sandbox; a test keeps the two equal.
"""

from __future__ import annotations

from typing import Any

SYSTEM = "You are a coding agent."
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "bash",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}
QUIET = "ok"
"""What the tool answers when a command prints nothing and ends with 0."""


def tool_content(output: str, code: int | None) -> str:
    """The tool message for a command's output and exit code (None: it was killed at its time limit)."""
    text = output.rstrip("\n")
    if code == 0:
        return text or QUIET
    ending = "[timed out]" if code is None else f"[exit code {code}]"
    return f"{text}\n{ending}" if text else ending
