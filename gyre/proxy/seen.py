"""What an execution's calls have shown so far, for harnesses that name neither threads nor parents.

Owns the memory that thread rules may use. Invariant: it is a function of the calls that were accepted, in their order;
reading it changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from gyre.proxy.conversation import Conversation, ToolCall


class Seen:
    """System prompts by the thread that first used them, and the prompts of tool calls that may start agents."""

    def __init__(self) -> None:
        self._threads: dict[str | None, tuple[str, str]] = {}
        self._prompts: dict[str, str] = {}

    def note(self, thread: str, role: str, conversation: Conversation) -> None:
        """A call was accepted."""
        self._threads.setdefault(conversation.system, (thread, role))

    def note_calls(self, calls: Iterable[ToolCall]) -> None:
        """A reply calls tools; a text argument called `prompt` or `message` is what a sub-agent would be asked."""
        for call in calls:
            try:
                arguments = json.loads(call.arguments)
            except (ValueError, RecursionError):
                continue
            for name in ("prompt", "message"):
                prompt = arguments.get(name) if isinstance(arguments, dict) else None
                if isinstance(prompt, str) and prompt.strip():
                    self._prompts[prompt.strip()] = call.id

    def thread_of(self, system: str | None) -> tuple[str, str] | None:
        """(thread, role) of the first call with this system prompt."""
        return self._threads.get(system)

    @property
    def empty(self) -> bool:
        """No call was accepted yet."""
        return not self._threads

    def caller(self, texts: Iterable[str]) -> str:
        """The id of the newest tool call whose prompt is one of `texts`, or ""."""
        return next((self._prompts[text.strip()] for text in texts if text.strip() in self._prompts), "")
