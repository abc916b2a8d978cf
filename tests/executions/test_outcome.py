"""The outcome table: one case a row, and what must hold for every ending."""

from __future__ import annotations

import errno
import shutil
from typing import Any

import pytest
from hypothesis import given, strategies as st

from gyre.executions.backoff import pause_before
from gyre.executions.grading import FAILED, GRADED, TIMED_OUT, Grade
from gyre.executions.outcome import Ending, Verdict, before_grading, judge, not_laid_out
from gyre.executions.sandbox import ExitStatus

GOOD = Grade(reward=0.75, reason=GRADED, seconds=1.0)
NO_REWARD = Grade(reward=None, reason=FAILED, seconds=1.0)
LATE = Grade(reward=None, reason=TIMED_OUT, seconds=1.0)
FINISHED = ExitStatus(code=0)


@pytest.mark.parametrize(
    ("ending", "grade", "verdict"),
    [
        ({}, GOOD, Verdict("graded", "finished", 0.75)),
        ({"exit": ExitStatus(code=3)}, GOOD, Verdict("graded", "harness_failed", 0.75)),
        ({"exit": ExitStatus(signal=11)}, GOOD, Verdict("graded", "harness_failed", 0.75)),
        ({"exit": ExitStatus(signal=9, limit="disk")}, GOOD, Verdict("graded", "limit_disk", 0.75)),
        ({"exit": ExitStatus(timed_out=True)}, GOOD, Verdict("graded", "harness_timeout", 0.75)),
        ({"overall_timeout": True, "exit": ExitStatus(timed_out=True)}, GOOD, Verdict("excluded", "overall_timeout")),
        ({"server_error": True, "exit": ExitStatus(code=3)}, GOOD, Verdict("retry", "server_error")),
        ({"sandbox_error": "bwrap"}, None, Verdict("retry", "sandbox_failed")),
        ({"exit": ExitStatus(signal=9, limit="memory")}, None, Verdict("retry", "out_of_memory")),
        ({"model_calls": 0}, GOOD, Verdict("excluded", "no_model_call")),
        ({}, NO_REWARD, Verdict("excluded", "grader_failed")),
        ({}, LATE, Verdict("excluded", "grader_timeout")),
        ({}, None, Verdict("excluded", "grader_failed")),
        ({"interrupted": True, "exit": ExitStatus()}, GOOD, Verdict("graded", "interrupted", 0.75)),
        ({"interrupted": True, "exit": ExitStatus()}, NO_REWARD, Verdict("retry", "interrupted")),
        ({"interrupted": True, "exit": ExitStatus(), "model_calls": 0}, None, Verdict("retry", "interrupted")),
        ({"image_error": "no image"}, None, Verdict("excluded", "image_unavailable")),
        ({"unhealthy": True, "exit": ExitStatus(code=86)}, None, Verdict("excluded", "environment_unhealthy")),
    ],
)
def test_table(ending: dict[str, Any], grade: Grade | None, verdict: Verdict) -> None:
    assert judge(Ending(**{"exit": FINISHED, "model_calls": 1, **ending}), grade) == verdict


def test_a_server_error_that_the_harness_got_over_is_graded() -> None:
    ending = Ending(exit=ExitStatus(code=0), model_calls=3, server_error=True)
    assert judge(ending, GOOD).outcome == "graded"


def test_a_server_error_before_any_call_is_tried_again_rather_than_excluded() -> None:
    assert judge(Ending(exit=ExitStatus(code=3), server_error=True), None).outcome == "retry"


endings = st.builds(
    Ending,
    image_error=st.sampled_from(["", "x"]),
    sandbox_error=st.sampled_from(["", "x"]),
    overall_timeout=st.booleans(),
    exit=st.builds(
        ExitStatus,
        code=st.sampled_from([None, 0, 1]),
        signal=st.sampled_from([None, 9]),
        timed_out=st.booleans(),
        limit=st.sampled_from(["", "memory", "disk"]),
    ),
    model_calls=st.integers(0, 3),
    server_error=st.booleans(),
    interrupted=st.booleans(),
    unhealthy=st.booleans(),
)
grades = st.none() | st.sampled_from([GOOD, NO_REWARD, LATE])


@given(endings, grades)
def test_a_reward_exactly_when_graded(ending: Ending, grade: Grade | None) -> None:
    verdict = judge(ending, grade)
    assert (verdict.reward is not None) == (verdict.outcome == "graded")
    if verdict.outcome == "graded":
        assert ending.model_calls > 0
        assert grade == GOOD
        assert before_grading(ending) is None


def test_pauses_double_up_to_a_limit() -> None:
    assert [pause_before(failures) for failures in (0, 1, 2, 3, 7, 1000)] == [0.0, 0.5, 1.0, 2.0, 30.0, 30.0]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "sandbox_failed"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "sandbox_failed"),
        (OSError(errno.EIO, "Input/output error"), "sandbox_failed"),
        (OSError(errno.EMFILE, "Too many open files"), "sandbox_failed"),
        (shutil.Error([("a", "b", "[Errno 28] No space left on device: 'b'")]), "sandbox_failed"),
        (OSError(errno.ENOENT, "No such file or directory"), "image_unavailable"),
        (OSError("not a usable image"), "image_unavailable"),
    ],
)
def test_layers_that_cannot_be_laid_out(error: OSError, reason: str) -> None:
    """A fault of the node is tried again; the environment's own excludes the execution."""
    verdict = before_grading(not_laid_out(error))
    assert verdict is not None
    assert (verdict.outcome, verdict.reason) == ("retry" if reason == "sandbox_failed" else "excluded", reason)
