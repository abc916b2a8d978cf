"""Wire formats. A dialect is one module; `DIALECTS` maps a path (without its prefix) to the one that serves
it.
"""

from __future__ import annotations

from gyre.proxy.dialects.chat import Chat
from gyre.proxy.exchange import Dialect

DEFAULT: Dialect = Chat()
"""Answers what belongs to no dialect: unknown paths, unknown keys."""

_ALL: tuple[Dialect, ...] = (DEFAULT,)
DIALECTS: dict[str, Dialect] = {path: dialect for dialect in _ALL for path in dialect.paths}
