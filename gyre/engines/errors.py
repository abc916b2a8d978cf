"""What can go wrong with an engine.

Two classes decide what the caller does: an unavailable engine is left and the call continues elsewhere; a refusal is
our own mistake and would be refused everywhere.
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of every failure that the engine client reports."""


class EngineUnavailable(EngineError):
    """The engine did not answer, dropped the connection, or failed by itself (5xx): continue on another engine."""


class EngineRefused(EngineError):
    """The engine, or the client before it, refused the request. `status` is the HTTP status, 0 if never sent."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class EngineUnauthorized(EngineRefused):
    """A key is missing or wrong (401, 403)."""
