"""What a dialect takes from a request and gives in a reply, in neutral form.

Owns the seam between dialects and the rest: a dialect is one module that maps a body to a `Request`, and a
`Reply` or a `Refusal` to its own JSON and events. Nothing here knows any dialect.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from gyre.proxy.conversation import Conversation, Message, ToolCall
from gyre.proxy.seen import Seen

if TYPE_CHECKING:
    from gyre.proxy.histories import Histories

Kind = Literal["invalid", "unsupported", "context", "unauthorized", "not_found", "too_large", "limit", "server"]


class Refusal(Exception):
    """A request that gets an error. `context`: (prompt tokens, maximum) of an over-long prompt."""

    def __init__(self, kind: Kind, message: str, context: tuple[int, int] = (0, 0)) -> None:
        super().__init__(message)
        self.kind = kind
        self.context = context


class Hints(msgspec.Struct, frozen=True, kw_only=True):
    """What the neutral form has no place for, and roles are told by.

    `first_user`, `last_user`: text blocks of the first and the last user's message; `server_tools`: types of offered
    tools that are not rendered, because the harness never runs them; `structured`: a reply of a given shape is wished.
    """

    first_user: tuple[str, ...] = ()
    last_user: tuple[str, ...] = ()
    server_tools: tuple[str, ...] = ()
    structured: bool = False
    session: str = ""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A model request. `asked` is what the harness wished for sampling: recorded and ignored.

    `identity`: a digest that two equal requests share. `spoken`: rendered tool name -> how the
    dialect names it, where these differ.
    """

    conversation: Conversation
    model: str = ""
    max_tokens: int | None = None
    stops: tuple[str, ...] = ()
    stream: bool = False
    usage_in_stream: bool = False
    asked: dict[str, Any] = {}
    hints: Hints = Hints()
    identity: bytes = b""
    spoken: dict[str, tuple[str, ...]] = {}


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


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """How an event stream began before its reply was ready: its id and time, and the keep-alives sent so far."""

    id: str
    created: int
    lives: int = 0


class Dialect(Protocol):
    """A wire format. `paths` sample a reply; `counting` only say how long a prompt is."""

    paths: tuple[str, ...]
    counting: tuple[str, ...]

    def read(self, body: bytes, histories: Histories | None = None) -> Request:
        """Raises Refusal for what is malformed or cannot be represented; nothing is dropped. `histories`: what earlier
        requests of the execution held; reading is cheaper with it, and gives the same.
        """

    def write(self, request: Request, reply: Reply) -> bytes:
        """The JSON of a whole reply."""

    def count(self, tokens: int) -> bytes:
        """The JSON of a prompt's length."""

    def events(self, request: Request, reply: Reply, lives: int) -> Iterator[bytes]:
        """The event stream of a whole reply, after `lives` keep-alives."""

    def keep_alive(self, request: Request, opening: Opening) -> bytes:
        """Events that say nothing, which harnesses count as life; sent while the reply is generated."""

    def error(self, refusal: Refusal) -> tuple[int, bytes]:
        """HTTP status and body of an error."""

    def error_event(self, request: Request, refusal: Refusal, opening: Opening) -> bytes:
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

    def classify(self, headers: Mapping[str, str], request: Request, seen: Seen) -> Evidence:
        """Thread and role of a call, from it and from what the execution's earlier calls showed."""

    def normal(self, message: Message) -> Message:
        """Undo known edits; applied to what was recorded and to what comes back."""

    def same(self, recorded: Message, echoed: Message) -> bool:
        """Whether `echoed`, which bears ids that `recorded` issued, is `recorded` after edits the harness makes."""
