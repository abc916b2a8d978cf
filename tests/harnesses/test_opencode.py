"""The real OpenCode 1.18.33, in the sandbox: title, calls, an unknown tool, a sub-agent, compaction, a switch."""

from __future__ import annotations

import json

import pytest

from tests.harnesses.lab import Play, check_session
from tests.proxy.fake_harness import call

VERSION = "1.18.33"
pytestmark = pytest.mark.slow


def bash(command: str) -> str:
    return call("bash", command=command, description="run")


STEPS = [
    bash("echo x > out.txt && ls"),
    bash("sleep 1; echo a") + "\n" + bash("echo b"),
    call("fly", to="moon"),
    call("task", description="find", prompt="Find the bug, please.", subagent_type="general"),
    *[bash(f"echo {n}") for n in range(8)],
    *[bash("seq 1 900") for _ in range(10)],
    *[bash(f"echo after {n}") for n in range(3)],
]


class Session(Play):
    def reply(self, text: str) -> str:
        if "Generate a title" in text or "title generator" in text:
            return "Making a file"
        if "# Tools" not in text:
            self.summaries += 1
            return "<think>\nhm\n</think>\n\nout.txt was made."
        if "Make out.txt." not in text and not self.summaries:
            self.inner += 1
            return f"<think>\nhm\n</think>\n\nI look.\n{bash('ls')}" if self.inner < 3 else "It is in a.py."
        step = next(self.steps, None)
        return "All is done." if step is None else f"<think>\nhm\n</think>\n\nI act.\n{step}"


async def test_a_whole_session(lab):
    play = Session(lab, STEPS)
    result = await lab.run("opencode", VERSION, play, context=90_000, told_context=62_000)
    rows = check_session(lab, result, play, sub_agent=3, summaries=True, auxiliary=True)
    roles = [row.role for row in rows]
    assert "parent session ses_" in json.loads(rows[roles.index("sub-agent")].evidence)["role"]
