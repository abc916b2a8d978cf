"""Wire formats. A dialect is one module; `DIALECTS` maps a path (without its prefix) to the one that serves
it.
"""

from __future__ import annotations

from collections.abc import Mapping

from gyre.proxy.dialects.chat import Chat
from gyre.proxy.dialects.messages import Messages
from gyre.proxy.dialects.responses import Responses
from gyre.proxy.exchange import Dialect

DEFAULT: Dialect = Chat()
"""Answers what belongs to no dialect: unknown paths, unknown keys."""

_MESSAGES: Dialect = Messages()
_ALL: tuple[Dialect, ...] = (DEFAULT, _MESSAGES, Responses())
DIALECTS: dict[str, Dialect] = {path: dialect for dialect in _ALL for path in (*dialect.paths, *dialect.counting)}


def dialect_of(path: str, headers: Mapping[str, str]) -> Dialect:
    """The dialect of `path`, else the one in which whoever asks would understand an error."""
    found = DIALECTS.get(path)
    if found is not None:
        return found
    return _MESSAGES if "anthropic-version" in headers or path.startswith("/v1/messages") else DEFAULT
