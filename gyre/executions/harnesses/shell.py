"""The built-in `shell` harness: how its agent program is started in a sandbox.

Owns the launch of `shell_agent.py`. Invariant: the key is in the environment of the agent alone; the commands
that the model runs do not inherit it.
"""

from __future__ import annotations

from pathlib import Path

from gyre import __version__
from gyre.errors import UserError
from gyre.executions.harnesses import Launch, LaunchRequest
from gyre.executions.sandbox import Bind

AGENT = "/run/gyre/shell_agent.py"
INSTRUCTION = "/run/gyre/instruction.md"


class ShellHarness:
    """A minimal agent over chat completions that a tiny model can drive."""

    name = "shell"
    dialect = "openai-chat"

    def check(self, version: str) -> str:
        """It comes with gyre: its version is gyre's own."""
        if version not in ("", __version__):
            raise UserError(f"harness.version = {version!r}: shell comes with gyre {__version__}; leave the key out")
        return __version__

    def prepare(self, request: LaunchRequest) -> Launch:
        env = {
            **request.environment,
            "OPENAI_BASE_URL": f"http://127.0.0.1:{request.port}/v1",
            "OPENAI_API_KEY": request.key,
            "OPENAI_MODEL": request.model,
            "SHELL_INSTRUCTION": INSTRUCTION,
            "SHELL_MAX_TURNS": str(request.max_turns),
        }
        if request.max_tokens:
            env["SHELL_MAX_TOKENS"] = str(request.max_tokens)
        return Launch(
            argv=("/usr/bin/python3", "-I", "-S", AGENT),
            env=env,
            files={INSTRUCTION: request.task.instruction},
            binds=(Bind(Path(__file__).with_name("shell_agent.py"), AGENT),),
        )
