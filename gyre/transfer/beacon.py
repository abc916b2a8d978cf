"""The out-of-band proof that a peer runs: a port on which a session says its incarnation.

Owns the listening socket of a session's beacon. Invariant: a beacon answers only while its process is scheduled, so
a frozen process (whose kernel still completes TCP handshakes) gives no answer. The incarnation is no secret.
"""

from __future__ import annotations

import socket
import threading

from gyre.transfer.errors import TransferFailed

_GREETING = "gyre-transfer "
_MAX_ANSWER = 256


class Beacon:
    """Answers every connection on `host` with the incarnation until closed. `port` is chosen by the kernel."""

    def __init__(self, host: str, incarnation: str) -> None:
        self._answer = f"{_GREETING}{incarnation}\n".encode()
        self._socket = socket.create_server((host, 0), backlog=64)
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, name="transfer-beacon", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            with connection:
                try:
                    connection.settimeout(1.0)
                    connection.sendall(self._answer)
                except OSError:  # the asker went away: its own affair
                    continue

    def close(self) -> None:
        """Stop answering. Idempotent."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # already closed
            return
        self._socket.close()
        self._thread.join()


def ask(host: str, port: int, timeout: float) -> str:
    """The incarnation that answers there. Raises TransferFailed if none does within `timeout` seconds (per wait)."""
    try:
        with socket.create_connection((host, port), timeout=timeout) as connection:
            connection.settimeout(timeout)
            answer = b""
            while not answer.endswith(b"\n") and len(answer) < _MAX_ANSWER:
                part = connection.recv(_MAX_ANSWER)
                if not part:
                    break
                answer += part
    except OSError as error:
        raise TransferFailed(f"peer {host}:{port} does not answer ({error or type(error).__name__})") from error
    text = answer.decode("utf-8", "replace")
    if not text.startswith(_GREETING) or not text.endswith("\n"):
        raise TransferFailed(f"peer {host}:{port} is not a gyre session")
    return text[len(_GREETING) : -1]
