"""The real mini-swe-agent 2.4.6, in the sandbox: calls, a dropped reply, a switch in mid-call; tokens exact."""

from __future__ import annotations

import json

import pytest

from tests.harnesses.lab import Play, check_session
from tests.proxy.fake_harness import call

VERSION = "2.4.6"
pytestmark = pytest.mark.slow


def bash(command: str) -> str:
    return f"<think>\nhm\n</think>\n\nI act.\n{call('bash', command=command)}"


STEPS = [
    bash("echo x > out.txt && ls"),
    bash('printf "é \\"q\\"\\n  b  "'),
    "<think>\nhm\n</think>\n\nI only talk.",
    *[bash(f"echo {n}") for n in range(18)],
    "<tool_call>\n{broken\n</tool_call>",
    bash("python3 -c 'import sys; print(any(\"gyre\" in p for p in sys.path))'"),
    bash("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
]


class Session(Play):
    def reply(self, text: str) -> str:
        return next(self.steps)


async def test_a_whole_session(lab):
    play = Session(lab, STEPS)
    result = await lab.run("mini-swe-agent", VERSION, play)
    world = lab.world
    # A reply without a call is dropped: what follows forks off before it.
    rows = check_session(lab, result, play, malformed=1, forks={0, 3, 22})
    assert len(rows) == len(STEPS)
    assert [row.parent for row in rows[3:5]] + [rows[22].parent] == [2, 3, 21]
    # Its own trajectory holds the replies that it kept.
    path = result.workspace / "snapshot" / "logs/agent/mini-swe-agent.traj.json"
    kept = [m for m in json.loads(path.read_text())["messages"] if m["role"] == "assistant"]
    assert len(kept) == len(rows) - 2
    # The task's own Python does not see the harness's libraries.
    assert "False" in world.renderer.decode(rows[23].context)
