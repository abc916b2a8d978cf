"""Template families: the rules by which a family's chat template extends a conversation turn by turn.

A family is one module with the attributes of `Family`; a model whose family is not here is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from gyre.errors import UserError
from gyre.proxy.conversation import Conversation, Message, Tool
from gyre.proxy.parser import Parsed


class Family(Protocol):
    """What `template.py` asks of a family. Texts are template text, messages are a template's dictionaries."""

    name: str
    header: str
    """Opens an assistant's turn; with another word for "assistant" it opens any other message."""
    begin: str
    """What the template writes as its beginning-of-text token."""
    one_call: bool
    """A turn is one call or text, never both: the template has no form for more."""
    end_of_turn: str
    """The stop token that closes a turn."""
    other_stops: tuple[str, ...]
    """Further tokens at which sampling stops; a turn that ends with one still lacks its end of turn."""
    required: tuple[str, ...]
    """Texts that must be one token each."""

    def messages(self, conversation: Conversation) -> list[dict[str, Any]]:
        """The whole conversation as the template takes it."""

    def message(self, message: Message) -> dict[str, Any]:
        """One message as the template takes it."""

    def placeholder(self, mark: str) -> dict[str, Any]:
        """An assistant message that carries `mark`, to be replaced by recorded tokens."""

    def dummy_prefix(self, mark: str) -> list[dict[str, Any]]:
        """Messages to put before a tail; the last is an assistant's that carries `mark`."""

    def region(self, text: str, mark: str) -> tuple[int, int]:
        """Where the assistant turn that carries `mark` starts and ends in rendered text, end of turn
        included.
        """

    def parse(self, output: str, thinking_open: bool, tools: Sequence[Tool] = ()) -> Parsed:
        """Sampled text, without its stop token, taken apart. `tools` say what kind of value a parameter is."""


def family(name: str) -> Family:
    """The family called `name`. Raises UserError for one that is not known."""
    from gyre.proxy.families.llama3 import Llama3
    from gyre.proxy.families.qwen3 import Qwen3
    from gyre.proxy.families.qwen3_coder import Qwen3Coder, Qwen35

    families: tuple[Family, ...] = (Qwen3(), Qwen3Coder(), Qwen35(), Llama3())
    known = {entry.name: entry for entry in families}
    if name not in known:
        raise UserError(f"model.template: {name!r} is not a known template family; known: {', '.join(known)}")
    return known[name]
