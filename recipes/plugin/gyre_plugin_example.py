"""An example of gyre's three entry points: questions as tasks, an agent of one call, and a reward for being close."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import SequenceMatcher
from pathlib import Path

import gyre_plugin_agent

from gyre.errors import UserError
from gyre.executions.dockerfile import Environment
from gyre.executions.harnesses import Launch, LaunchRequest
from gyre.executions.rewards import NoReward
from gyre.executions.sandbox import Bind
from gyre.executions.tasks import Task, environment_digest

AGENT, QUESTION = "/run/gyre/agent.py", "/run/gyre/question.txt"


class Questions:
    """Folders of question.txt and tests/answer.txt. The agent writes answer.txt; the grader copies it out."""

    def recognises(self, folder: Path) -> bool:
        return (folder / "question.txt").is_file()

    def load(self, folder: Path, env: Mapping[str, str]) -> Task:
        if not (folder / "tests" / "answer.txt").is_file():
            raise UserError(f"{folder / 'tests/answer.txt'}: missing; it holds the right answer")
        return Task(
            name=folder.name,
            folder=folder,
            instruction=(folder / "question.txt").read_text().strip(),
            environment=Environment(folders=("/app",)),
            digest=environment_digest(folder.name, "/app", folder),
            test_text="cat answer.txt >/logs/verifier/answer.txt 2>/dev/null; true",
            solve_file="solution.sh",
            reward="closeness",
        )


def closeness(task: Task, folder: Path) -> float:
    """1 for the right answer, less the more it differs, 0 for none."""
    try:
        given = (folder / "answer.txt").read_text(errors="replace").strip()
    except OSError as error:
        raise NoReward(f"the grader left no answer.txt: {error}") from error
    return SequenceMatcher(None, given, (task.tests / "answer.txt").read_text().strip()).ratio()


class OneCall:
    """Asks the model once, and writes what it says to answer.txt."""

    name = "one-call"
    dialect = "openai-chat"

    def check(self, version: str) -> str:
        return version or "0.1"

    def prepare(self, request: LaunchRequest) -> Launch:
        return Launch(
            argv=("/usr/bin/python3", AGENT, f"http://127.0.0.1:{request.port}/v1/chat/completions", request.model),
            env={"API_KEY": request.key},
            files={QUESTION: request.task.instruction},
            binds=(Bind(Path(gyre_plugin_agent.__file__), AGENT),),
        )
