"""Who may call what: SGLang's two bearer keys.

Generation and information need the api key; management needs the admin key, or the api key where there is no admin key.
Health is open. Keys come from a file that only its owner can read, never from the command line.
"""

from __future__ import annotations

import hmac
import stat
from pathlib import Path

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from gyre.errors import UserError


class Keys(msgspec.Struct, frozen=True):
    """Empty or absent means that no such key is asked for."""

    api_key: str | None = None
    admin_key: str | None = None


def read_keys(path: str | None) -> Keys:
    """Keys from a JSON file of mode 0600 (or stricter).

    Raises UserError if others can read it or it is not such a file.
    """
    if path is None:
        return Keys()
    try:
        mode = stat.S_IMODE(Path(path).stat().st_mode)
        data = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"--key-file {path}: {error.strerror}") from error
    if mode & 0o077:
        raise UserError(f"--key-file {path}: mode is {mode:o}, others can read it; run chmod 600 on it")
    try:
        return msgspec.json.decode(data, type=Keys)
    except msgspec.DecodeError as error:
        raise UserError(f'--key-file {path}: expected {{"api_key": ..., "admin_key": ...}}: {error}') from error


def _is_bearer(header: str | None, key: str) -> bool:
    kind, _, token = (header or "").partition(" ")
    return kind.lower() == "bearer" and hmac.compare_digest(token.encode(), key.encode())


def middleware(keys: Keys, management: frozenset[str]) -> Middleware:
    """Answer 401 to a request whose path needs a key that it does not carry."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        needed = keys.api_key
        if request.path in management:
            needed = keys.admin_key or keys.api_key
        if request.path.startswith("/health"):
            needed = None
        if needed and not _is_bearer(request.headers.get("Authorization"), needed):
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    return check
