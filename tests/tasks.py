"""Tasks for runs under test, whose rewards do not depend on what a model happens to sample."""

from __future__ import annotations

import shutil
from pathlib import Path

TASKS = Path(__file__).resolve().parents[1] / "recipes" / "tasks" / "quickstart"
VERIFIER = """#!/bin/bash
printf '0.%05d\\n' "$RANDOM" >"${GYRE_ROOT:-}/logs/verifier/reward.txt"
"""


def graded_at_random(folder: Path) -> Path:
    """Copies of the quickstart's tasks in `folder`, whose verifiers draw the reward, and whose agents have an hour.

    Rewards of a group that are all equal train nothing; drawn ones differ, so every group has targets. How long an
    agent may take is the recipe's word then: tests hold agents while something else starts again.
    """
    for task in sorted(TASKS.iterdir()):
        shutil.copytree(task, folder / task.name)
        described = folder / task.name / "task.toml"
        described.write_text(described.read_text().replace("timeout_sec = 120.0", "timeout_sec = 3600.0"))
        (folder / task.name / "tests" / "test.sh").write_text(VERIFIER)
    return folder
