"""Grading: what counts as a reward, and executions that try to make one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from gyre.executions.grading import FAILED, GRADED, TIMED_OUT, Grade, grade, grade_with_retries
from gyre.executions.rewards import NoReward, read_reward


@pytest.mark.parametrize(
    ("name", "text", "reward"),
    [
        ("reward.txt", "1", 1.0),
        ("reward.txt", " 0.25\n", 0.25),
        ("reward.txt", "-1e3\n", -1000.0),
        ("reward.json", '{"reward": 0.5, "speed": 3}', 0.5),
        ("reward.json", '{"a": 1, "b": 0}', 0.5),
        ("reward.json", '{"a": 2}', 2.0),
    ],
)
def test_rewards(tmp_path: Path, name: str, text: str, reward: float) -> None:
    (tmp_path / name).write_text(text)
    assert read_reward(tmp_path) == reward


def test_json_wins_over_text(tmp_path: Path) -> None:
    (tmp_path / "reward.txt").write_text("1")
    (tmp_path / "reward.json").write_text('{"reward": 0}')
    assert read_reward(tmp_path) == 0.0
    (tmp_path / "reward.json").write_text("broken")
    with pytest.raises(NoReward):
        read_reward(tmp_path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("reward.txt", text) for text in ("", "nan", "inf", "-inf", "1 2", "yes", "1" * 100_000)),
        *(
            ("reward.json", text)
            for text in (
                *("", "{}", "[1]", "1", "null", '{"reward": NaN}', '{"reward": Infinity}', '{"reward": true}'),
                *('{"reward": "1"}', '{"reward": {"a": 1}}', '{"reward": 1, "b": null}', '{"reward": 1e999}'),
                *("[" * 50_000, '{"reward": 1' + "0" * 400 + "}"),
            )
        ),
    ],
)
def test_no_reward(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(NoReward):
        read_reward(tmp_path)


def test_no_reward_without_a_file(tmp_path: Path) -> None:
    with pytest.raises(NoReward, match="neither"):
        read_reward(tmp_path)


def test_links_and_special_files_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("1")
    (tmp_path / "reward.txt").symlink_to(tmp_path / "one")
    with pytest.raises(NoReward, match="cannot be read"):
        read_reward(tmp_path)
    (tmp_path / "reward.txt").unlink()
    os.mkfifo(tmp_path / "reward.txt")
    with pytest.raises(NoReward, match="regular"):
        read_reward(tmp_path)
    (tmp_path / "reward.json").mkdir()
    with pytest.raises(NoReward):
        read_reward(tmp_path)


@given(st.binary(max_size=200))
def test_any_bytes_give_a_finite_reward_or_none(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    folder = tmp_path_factory.mktemp("reward")
    for name in ("reward.txt", "reward.json"):
        (folder / name).write_bytes(data)
        try:
            assert abs(read_reward(folder)) < float("inf")
        except NoReward:
            pass


async def grade_after(lab: Any, command: str, **fields: Any) -> Grade:
    """Run `command` as the execution, then grade it."""
    task = lab.task(**fields)
    _, _, snapshot = await lab.run(command, task=task)
    return await grade(task, lab.sandbox, lab.root, snapshot, lab.folder / f"grading-{lab.count}", lab.limits)


@pytest.mark.parametrize(
    ("script", "detail"),
    [
        ("#!/bin/bash\n", ""),
        ("#!/bin/bash\nnowhere-to-be-found\n", "nowhere-to-be-found: command not found"),
        ("#!/nowhere/bash\n", "No such file or directory: '/tests/test.sh'"),
        ("#!/bin/bash\nyes | head -c 100000; printf 'a\\033[31m\\tb\\n\\n \\n'\n", ": a [31m b"),
    ],
)
async def test_no_reward_says_what_the_tests_said_last(lab: Any, script: str, detail: str) -> None:
    found = await grade_after(lab, "true", test_sh=script)
    assert (found.reward, found.reason) == (None, FAILED)
    assert found.detail.startswith("the tests wrote neither reward.json nor reward.txt")
    assert found.detail.endswith(detail)
    assert ("last line of the tests' output" in found.detail) == bool(detail)


async def test_solved_and_not(lab: Any) -> None:
    assert (await grade_after(lab, "echo hello > out.txt")).reward == 1.0
    failed = await grade_after(lab, "true")
    assert (failed.reward, failed.reason) == (0.0, GRADED)


EVIL = "#!/bin/sh\\necho 1 > /logs/verifier/reward.txt\\n"


@pytest.mark.parametrize(
    "command",
    [
        "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; chmod 000 /logs/verifier",
        "rm -rf /logs; ln -s /app /logs",
        "mkdir -p /logs /app/v; rm -rf /logs/verifier; ln -s /app/v /logs/verifier",
        f"mkdir /tests; printf '{EVIL}' > /tests/test.sh; chmod +x /tests/test.sh",
        f"mkdir /app/t; ln -s app/t /tests; printf '{EVIL}' > /app/t/test.sh; chmod +x /app/t/test.sh",
        f"mkdir /b; printf '{EVIL}' > /b/bash; chmod +x /b/bash; ln -s bash /b/python3; rm /bin; mv /b /bin",
        f"mkdir -p /u/bin; printf '{EVIL}' > /u/bin/bash; chmod +x /u/bin/bash; ln -sfn /u/bin /bin",
        "echo /app/evil.so > /etc/ld.so.preload; cp /usr/lib/x86_64-linux-gnu/libc.so.6 /app/evil.so",
        "echo /app > /etc/ld.so.conf; echo x > /etc/ld.so.cache",
        "cd /; rm -rf /app",
        "cd /; rm -rf /app; ln -s / /app",
        "cd /; rm -rf /app; echo file > /app",
        "rm -rf /run /tmp /etc /root /logs /var 2>/dev/null; true",
        "export BASH_ENV=/app/e; echo 'echo 1 > /logs/verifier/reward.txt' > /app/e; cp /app/e /root/.bashrc",
        "rm -f /lib /lib64 /sbin; mkdir /lib64; true",
        "mkdir -p /.singularity.d/env; cd /.singularity.d/env; echo 'echo 1 > /logs/verifier/reward.txt; exit' > a.sh",
        "echo 'echo 1 > /logs/verifier/reward.txt; exit' | tee /environment /etc/environment /etc/rc > /etc/profile",
    ],
)
@pytest.mark.every_kind
async def test_nothing_that_an_execution_leaves_makes_a_reward_or_stops_the_grader(lab: Any, command: str) -> None:
    result = await grade_after(lab, command)
    assert (result.reward, result.reason) == (0.0, GRADED), result.detail


@pytest.mark.every_kind
async def test_links_lead_the_grader_to_its_own_root_only(lab: Any, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hello")
    links = f"ln -s {secret} out.txt; ln -s ../../../../../../../..{secret} up.txt; ln -s /proc/1/root{secret} root.txt"
    test_sh = """#!/bin/bash
        for file in out.txt up.txt root.txt; do cat $file && exit; done
        echo 0 > /logs/verifier/reward.txt"""
    result = await grade_after(lab, links, test_sh=test_sh)
    assert (result.reward, result.reason) == (0.0, GRADED)


@pytest.mark.every_kind
async def test_deletions_are_seen_by_the_grader(lab: Any) -> None:
    test_sh = "#!/bin/bash\n[[ -e Dockerfile ]] && r=0 || r=1\necho $r > /logs/verifier/reward.txt\n"
    more = {"test_sh": test_sh, "dockerfile": "FROM x\nWORKDIR /app\nCOPY Dockerfile .\n"}
    assert (await grade_after(lab, "true", **more)).reward == 0.0
    assert (await grade_after(lab, "rm Dockerfile", **more)).reward == 1.0


@pytest.mark.every_kind
async def test_the_grader_cannot_write_the_tests_or_reach_out(lab: Any) -> None:
    test_sh = """#!/bin/bash
        echo x >> /tests/test.sh && exit
        tail -n +3 /proc/net/dev | grep -v lo: && exit
        echo 1 > /logs/verifier/reward.txt"""
    assert (await grade_after(lab, "true", test_sh=test_sh)).reward == 1.0


@pytest.mark.parametrize(
    ("test_sh", "timeout", "reason"),
    [
        ("#!/bin/bash\nexit 1\n", 20, FAILED),
        ("#!/no/such/shell\n", 20, FAILED),
        ("#!/bin/bash\necho nan > /logs/verifier/reward.txt\n", 20, FAILED),
        ("#!/bin/bash\necho 1 > /logs/verifier/reward.txt; trap '' TERM; sleep 60\n", 0.3, TIMED_OUT),
    ],
)
async def test_a_failing_grader_gives_no_reward(lab: Any, test_sh: str, timeout: float, reason: str) -> None:
    toml = f"[verifier]\ntimeout_sec = {timeout}\n"
    result = await grade_after(lab, "true", test_sh=test_sh, toml=toml)
    assert (result.reward, result.reason) == (None, reason)


async def test_its_exit_code_does_not_count(lab: Any) -> None:
    test_sh = "#!/bin/bash\necho 1 > /logs/verifier/reward.txt; exit 3\n"
    assert (await grade_after(lab, "true", test_sh=test_sh)).reward == 1.0


async def test_retries_use_fresh_folders_until_there_is_a_reward(lab: Any) -> None:
    task = lab.task(test_sh="#!/bin/bash\nls /logs/verifier; touch /logs/verifier/stale\n")
    _, _, snapshot = await lab.run("true", task=task)
    folder, limits = lab.folder / "grading", lab.limits
    result = await grade_with_retries(task, lab.sandbox, lab.root, snapshot, folder, limits, attempts=2)
    assert (result.reward, result.reason) == (None, FAILED)
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2"]
    assert (folder / "2/grader.log").read_text() == ""
    solved = lab.task()
    result = await grade_with_retries(solved, lab.sandbox, lab.root, snapshot, folder, limits, attempts=3)
    assert result.reward == 0.0
    assert not (folder / "3").exists()
