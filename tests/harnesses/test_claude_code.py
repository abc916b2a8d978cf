"""The real Claude Code, in the sandbox: tools, a sub-agent, compaction, a switch in mid-call; tokens exact."""

from __future__ import annotations

import json

import pytest

from gyre.proxy.harness_rules.claude_code import SUMMARY_MARKER
from tests.harnesses.lab import Play, check_exact
from tests.proxy.fake_harness import call

CONTEXTS = {"2.1.220": 90_000, "2.1.332": 66_000}
"""The version that was measured, and a current one; room for its first prompt (as we tokenise it) and 23,000 more."""
pytestmark = pytest.mark.slow


def think(text: str) -> str:
    return f"<think>\nI think.\n</think>\n\nOn it.\n{text}"


def bash(command: str) -> str:
    return call("Bash", command=command, description="run")


STEPS = [
    bash("cd /app && echo x > out.txt && ls"),
    bash("sleep 1; echo slow") + "\n" + bash("echo quick"),
    call("Write", file_path="/app/a.py", content="def f():  \n    return 1\t\n"),
    call("Edit", file_path="/app/a.py", old_string="return 1", new_string="return 2  ", replace_all="false"),
    bash("cat /app/a.py") + "\nThen I go on.",
    call("Bash", timeout=1000.0, command="true", description="keys"),
    call("Read", file_path="/app/a.py"),
    call("AGENT", description="find", prompt="Find the bug, please.", subagent_type="general-purpose"),
    *[bash(f"echo {n}") for n in range(9)],
    *[bash("seq 1 1000") for _ in range(8)],
    *[bash(f"echo after {n}") for n in range(4)],
]


class Session(Play):
    """What the model says to Claude Code."""

    def reply(self, text: str) -> str:
        last = text.rsplit("<|im_start|>assistant\n", 2)[-2]
        if SUMMARY_MARKER in last:
            self.summaries += 1
            return "<think>\nhm\n</think>\n\n<summary>Files were made: out.txt, a.py.</summary>"
        if "Make out.txt." not in text and not self.summaries:
            self.inner += 1
            return think(bash("ls /app")) if self.inner < 3 else "It is in a.py."
        step = next(self.steps, None)
        # The tool that starts agents has had two names.
        named = "Agent" if '"name": "Agent"' in text else "Task"
        return "All is done." if step is None else think(step.replace("AGENT", named))


@pytest.mark.parametrize("version", CONTEXTS)
async def test_a_whole_session(lab, version):
    play = Session(lab, STEPS)
    result = await lab.run("claude-code", version, play, context=CONTEXTS[version])
    world = lab.world
    assert (result.outcome, result.reason, result.reward) == ("graded", "finished", 1.0), lab.output()[-3000:]
    rows = check_exact(world)
    roles = [row.role for row in rows]
    assert len(rows) >= 25
    assert set(roles) == {"main", "sub-agent", "main-summary"}
    assert roles.count("sub-agent") == 3
    assert play.summaries >= 1
    # Forks: the first turn, the sub-agent's first, each summary's and what follows one. No other.
    broken = [row.turn for row in rows if row.parent < 0 or row.keep < len(world.whole(row.parent))]
    expected = {0, roles.index("sub-agent")}
    for number, role in enumerate(roles):
        if role == "main-summary":
            expected |= {number, number + 1}
    assert set(broken) <= expected, (broken, expected)
    assert any(len(row.spans) == 2 for row in rows)
    assert "prompt of tool call call_" in rows[roles.index("sub-agent")].evidence
    # Its own transcript: each of its messages is a turn of ours, and its count of tokens is ours.
    lines = [json.loads(line) for line in lab.output().splitlines() if line.startswith("{")]
    told = {
        line["message"]["id"]
        for line in lines
        if line.get("type") == "assistant" and line["message"]["id"][:4] == "msg_"
    }
    assert len(told) == len(rows) - roles.count("main-summary")
    (ended,) = [line for line in lines if line.get("type") == "result"]
    assert (ended["subtype"], ended["is_error"]) == ("success", False)
    assert sum(model["outputTokens"] for model in ended["modelUsage"].values()) == world.capture.stats.tokens_sampled
