"""What the harnesses from npm and PyPI have in common: an installed folder, and the task as one argument.

Invariant: the key is in the environment alone, never on a command line or in a file.
"""

from __future__ import annotations

from pathlib import Path

from gyre.errors import UserError
from gyre.executions.harnesses import Launch, LaunchRequest
from gyre.executions.harnesses.install import bound, folder_of

ARGUMENT_BYTES = 128 * 1024 - 1
"""Of one argument on Linux, which a NUL ends."""


class Packaged:
    """A harness in the cache folder. Subclasses say how it is started."""

    name = ""
    dialect = ""
    instruction_bytes = ARGUMENT_BYTES

    def __init__(self, cache: Path | None = None) -> None:
        self._cache = cache
        self._version = ""

    def check(self, version: str) -> str:
        self._version, _ = folder_of(self.name, version, self._cache)
        return self._version

    def prepare(self, request: LaunchRequest) -> Launch:
        _, folder = folder_of(self.name, self._version, self._cache)
        # What was measured depends on the pinned variables: a recipe adds to them and does not replace them.
        return Launch(
            argv=self.argv(request, folder),
            env={**request.environment, **self.environment(request)},
            files=self.files(request),
            binds=bound(folder),
        )

    def argv(self, request: LaunchRequest, folder: Path) -> tuple[str, ...]:
        """The command, with paths as seen inside."""
        raise NotImplementedError

    def environment(self, request: LaunchRequest) -> dict[str, str]:
        """The pinned variables."""
        raise NotImplementedError

    def files(self, request: LaunchRequest) -> dict[str, str]:
        """Files inside -> text."""
        return {}


def found_inside(folder: Path, pattern: str, inside: str) -> str:
    """The one file that `pattern` names in `folder`, as seen inside. Raises UserError when it is not there."""
    for path in sorted(folder.glob(pattern)):
        return f"{inside}/{path.relative_to(folder)}"
    raise UserError(f"{folder} has no {pattern}: remove the folder and install the harness again")
