"""Errors that a user can mend.

Owns the one class that the command line turns into a single line and an exit code. Everything else that escapes
is a defect of gyre and keeps its traceback.
"""

from __future__ import annotations


class UserError(Exception):
    """A mistake or a limit outside gyre. The message is one line: it names the key, file or line and says what to do.

    `code` is the exit status of the command: 2 for wrong use, 1 for something that failed.
    """

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code
