"""The real Claude Code, in the sandbox: tools, a sub-agent, compaction, a switch in mid-call; tokens exact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from gyre.executions.tasks import load_task
from gyre.proxy.harness_rules.claude_code import SUMMARY_MARKER
from tests.harnesses.lab import Play, check_exact, check_session
from tests.proxy.conftest import Script
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


def result_line(output: str) -> dict[str, Any]:
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    (ended,) = [line for line in lines if line.get("type") == "result"]
    return ended


@pytest.mark.parametrize("version", CONTEXTS)
async def test_a_whole_session(lab, version):
    play = Session(lab, STEPS)
    result = await lab.run("claude-code", version, play, context=CONTEXTS[version])
    rows = check_session(lab, result, play, sub_agent=3, summaries=True)
    roles = [row.role for row in rows]
    assert "prompt of tool call call_" in rows[roles.index("sub-agent")].evidence
    ended = result_line(lab.output())
    assert (ended["subtype"], ended["is_error"]) == ("success", False)


@pytest.mark.skipif(not Path("/usr/bin/pytest").exists(), reason="apt-get install python3-pytest")
@pytest.mark.parametrize("folder", ["terminal-bench/sum-lines", "nl2repo/slugs"])
async def test_the_small_tasks_of_other_formats(lab, folder):
    task = load_task(Path(__file__).parents[2] / "recipes/tasks" / folder)
    solution = task.solution.read_text()

    def rule(text, number):
        return [Script(think(bash(solution)) if "<tool_response>" not in text else "It is done.")]

    result = await lab.run("claude-code", "2.1.220", rule, task=task)
    assert (result.outcome, result.reason, result.reward) == ("graded", "finished", 1.0), lab.output()[-3000:]
    assert result.model_calls >= 2


async def test_a_task_of_several_steps_is_one_execution_of_new_conversations(lab):
    """As in Harbor, which runs the agent anew for each step and resumes no session unless a job asks for it."""
    task = load_task(Path(__file__).parents[2] / "recipes/tasks/several-steps/stock-count")
    task = structs.replace(task, memory=0)  # how much Claude Code takes is not what is asked here

    def rule(text, number):
        # Exactly one: the second session knows nothing of the first one's task.
        (step,) = [step for step in task.steps if step.instruction in text]
        solution = (task.folder / step.solve_file).read_text()
        return [Script(think(bash(solution)) if "<tool_response>" not in text else "It is done.")]

    result = await lab.run("claude-code", "2.1.332", rule, task=task)
    assert (result.outcome, result.reason, result.reward) == ("graded", "finished", 1.0), lab.output()[-3000:]
    assert [(step.name, step.reward, step.model_calls) for step in result.steps] == [
        ("count", 1.0, 2),
        ("delivery", 1.0, 2),
    ]
    rows = check_exact(lab.world, faults=0)
    assert [(row.turn, row.thread, row.role) for row in rows] == [(turn, "main", "main") for turn in range(4)]
    # What the sessions have in common ends before anything that the first one was told or sampled.
    assert [row.parent for row in rows] == [-1, 0, 0, 2]
    assert task.steps[0].instruction not in lab.renderer.decode(lab.world.whole(0)[: rows[2].keep])
    sessions = set()
    for number in (1, 2):
        ended = result_line(lab.output(number))
        assert (ended["subtype"], ended["is_error"]) == ("success", False)
        sessions.add(ended["session_id"])
    assert len(sessions) == 2
