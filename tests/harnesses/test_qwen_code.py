"""The real Qwen Code 0.15.10 (0.24 needs Node 22), in the sandbox: calls, a sub-agent, compression, a switch."""

from __future__ import annotations

import pytest

from tests.harnesses.lab import Play, check_session
from tests.proxy.fake_harness import call

VERSION = "0.15.10"
pytestmark = pytest.mark.slow


def shell(command: str) -> str:
    return call("run_shell_command", command=command, description="run", is_background=False)


STEPS = [
    shell("echo x > out.txt && ls"),
    shell("sleep 1; echo a") + "\n" + shell("echo b"),
    call("agent", description="find", prompt="Find the bug, please.", subagent_type="general-purpose"),
    *[shell(f"echo {n}") for n in range(8)],
    *[shell("seq 1 900") for _ in range(10)],
    *[shell(f"echo after {n}") for n in range(3)],
]


class Session(Play):
    def reply(self, text: str) -> str:
        if "# Tools" not in text:
            self.summaries += 1
            return "<think>\nhm\n</think>\n\n<state_snapshot>out.txt was made.</state_snapshot>"
        if "Make out.txt." not in text and not self.summaries:
            self.inner += 1
            return f"<think>\nhm\n</think>\n\nI look.\n{shell('ls')}" if self.inner < 3 else "It is in a.py."
        step = next(self.steps, None)
        return "All is done." if step is None else f"<think>\n hm \n</think>\n\nI act.\n{step}"


async def test_a_whole_session(lab):
    play = Session(lab, STEPS)
    result = await lab.run("qwen-code", VERSION, play, context=130_000, told_context=110_000)
    check_session(lab, result, play, sub_agent=3, summaries=True, auxiliary=True, transcript=False)
