"""What a dialect takes from a request and gives in a reply, in neutral form.

Owns the seam between dialects and the rest: a dialect is one module that maps a body to a `Request`, and a
`Reply` or a `Refusal` to its own JSON and events. Nothing here knows any dialect.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, Protocol

import msgspec

from gyre.proxy.conversation import Conversation, Message, ToolCall

Kind = Literal["invalid", "unsupported", "context", "unauthorized", "not_found", "too_large", "limit", "server"]


class Refusal(Exception):
    """A request that gets an error. `context`: (prompt tokens, maximum) of an over-long prompt."""

    def __init__(self, kind: Kind, message: str, context: tuple[int, int] = (0, 0)) -> None:
        super().__init__(message)
        self.kind = kind
        self.context = context


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A model request. `asked` is what the harness wished for sampling: recorded and ignored."""

    conversation: Conversation
    model: str = ""
    max_tokens: int | None = None
    stops: tuple[str, ...] = ()
    stream: bool = False
    usage_in_stream: bool = False
    asked: dict[str, Any] = {}


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What the harness gets. Call ids are ours. `created`: seconds since the epoch, for display."""

    id: str
    model: str
    created: int
    text: str
    thinking: str
    calls: tuple[ToolCall, ...]
    finish: Literal["stop", "length"]
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int


class Dialect(Protocol):
    """A wire format."""

    paths: tuple[str, ...]

    def read(self, body: bytes) -> Request:
        """Raises Refusal for what is malformed or cannot be represented; nothing is dropped."""

    def write(self, request: Request, reply: Reply) -> bytes:
        """The JSON of a whole reply."""

    def events(self, request: Request, reply: Reply) -> Iterator[bytes]:
        """The event stream of a whole reply."""

    def keep_alive(self, request: Request, reply_id: str, created: int) -> bytes:
        """An event that says nothing, which harnesses count as life; sent while the reply is generated."""

    def error(self, refusal: Refusal) -> tuple[int, bytes]:
        """HTTP status and body of an error."""

    def error_event(self, refusal: Refusal) -> bytes:
        """An error after the event stream began."""

    def models(self, names: list[str]) -> bytes:
        """The list of models."""


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """Which thread a call belongs to, in which role, and why."""

    thread: str = "main"
    role: str = "main"
    why: str = ""


class ThreadRules(Protocol):
    """What is known about a harness: who calls, and how it edits what we sampled. See roles.py."""

    def classify(self, headers: Mapping[str, str], conversation: Conversation) -> Evidence:
        """Thread and role of a call."""

    def normal(self, message: Message) -> Message:
        """Undo known edits; applied to what was recorded and to what comes back."""
