"""The real Codex CLI 0.171.0, in the sandbox: calls, a sub-agent, compaction, a switch in mid-call; tokens exact."""

from __future__ import annotations

import json
import re

import pytest

from tests.harnesses.lab import Play, check_session
from tests.proxy.fake_harness import call

VERSION = "0.171.0"
pytestmark = pytest.mark.slow


def run(cmd: str) -> str:
    return call("exec_command", cmd=cmd)


STEPS = [
    run("echo x > out.txt && ls"),
    run("echo a") + "\n" + run("echo b"),
    call("multi_agent_v1.spawn_agent", message="Find the bug, please."),
    call("multi_agent_v1.wait_agent", targets=["AGENT"], timeout_ms=60_000),
    *[run(f"echo {n}") for n in range(8)],
    *[run("seq 1 900") for _ in range(8)],
    *[run(f"echo after {n}") for n in range(3)],
]


class Session(Play):
    def reply(self, text: str) -> str:
        last = text.rsplit("<|im_start|>assistant\n", 2)[-2]
        if "handoff summary" in last.lower() or "CONTEXT CHECKPOINT" in last:
            self.summaries += 1
            return "<think>\nhm\n</think>\n\nout.txt was made."
        if "Make out.txt." not in text and not self.summaries:
            self.inner += 1
            return f"<think>\nhm\n</think>\n\nI look.\n{run('ls')}" if self.inner < 3 else "It is in a.py."
        found = re.findall(r'"agent_id": ?"([^"]+)"', text.replace('\\"', '"'))
        step = next(self.steps, None)
        if step is None:
            return "All is done."
        return f"<think>\nhm\n</think>\n\nI act.\n{step}".replace("AGENT", found[-1] if found else "none")


async def test_a_whole_session(lab):
    play = Session(lab, STEPS)
    result = await lab.run("codex", VERSION, play, context=70_000, told_context=62_000)
    rows = check_session(lab, result, play, sub_agent=3, summaries=True)
    roles = [row.role for row in rows]
    evidence = json.loads(rows[roles.index("sub-agent")].evidence)["role"]
    assert "thread_source subagent" in evidence
    assert "prompt of tool call call_" in evidence
    lines = [json.loads(line) for line in lab.output().splitlines() if line.startswith("{")]
    assert lines[-1]["type"] == "turn.completed"
