"""What an execution's end means: graded, tried again, or excluded.

Owns the decision table of DESIGN section 9 as pure functions. Invariant: a reward exists exactly when the
outcome is "graded"; no failure of gyre, of the machine or of a grader ever becomes a reward.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from gyre.executions.grading import GRADED, Grade
from gyre.executions.sandbox import ExitStatus
from gyre.ledger.files import FULL, errno_of

Outcome = Literal["graded", "excluded", "retry"]
INTERRUPTED = "interrupted"
NODE_FAULTS = FULL | {
    errno.EIO,
    errno.EROFS,
    errno.ENOMEM,
    errno.EMFILE,
    errno.ENFILE,
    errno.EAGAIN,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.ENODEV,
    errno.EREMOTEIO,
}
"""Another try, on this node or on another one, may go well."""


class Ending(Struct, frozen=True, kw_only=True):
    """How an execution ended, before it is graded.

    `server_error`: the harness got a server error or a broken stream from us; it did not get over it when it then
    failed or ran out of time.
    """

    image_error: str = ""
    sandbox_error: str = ""
    overall_timeout: bool = False
    exit: ExitStatus = ExitStatus()
    model_calls: int = 0
    server_error: bool = False
    interrupted: bool = False
    """It was ended with its job, before it had ended by itself."""
    unhealthy: bool = False
    """The environment's healthcheck failed, so the harness did not start."""


def not_laid_out(error: OSError) -> Ending:
    """The ending of an execution whose layers could not be laid out: the node's fault (its disk is full or broken, it
    has no memory or descriptors left) is the sandbox's; anything else is the environment's, wherever it runs."""
    if errno_of(error) in NODE_FAULTS:
        return Ending(sandbox_error=str(error))
    return Ending(image_error=str(error))


class Verdict(Struct, frozen=True):
    """`reason` says why in one word; for a graded execution, how the harness ended."""

    outcome: Outcome
    reason: str
    reward: float | None = None


def before_grading(ending: Ending) -> Verdict | None:
    """The verdict where there is nothing to grade; None: grade it."""
    if ending.unhealthy:
        return Verdict("excluded", "environment_unhealthy")
    if ending.image_error:
        return Verdict("excluded", "image_unavailable")
    if ending.overall_timeout:
        return Verdict("excluded", "overall_timeout")
    if ending.sandbox_error:
        return Verdict("retry", "sandbox_failed")
    if ending.interrupted and ending.model_calls == 0:
        return Verdict("retry", INTERRUPTED)
    if ending.server_error and ending.exit.code != 0:
        return Verdict("retry", "server_error")
    if ending.exit.limit == "memory":
        return Verdict("retry", "out_of_memory")
    if ending.model_calls == 0:
        return Verdict("excluded", "no_model_call")
    return None


def judge(ending: Ending, grade: Grade | None) -> Verdict:
    """The whole table.

    `grade` is the last one within the grader's budget; it is ignored where nothing was to be graded.
    """
    verdict = before_grading(ending)
    if verdict is not None:
        return verdict
    if grade is None or grade.reason != GRADED or grade.reward is None:
        if ending.interrupted:
            return Verdict("retry", INTERRUPTED)
        return Verdict("excluded", "grader_failed" if grade is None else grade.reason)
    return Verdict("graded", INTERRUPTED if ending.interrupted else _how_it_ended(ending.exit), grade.reward)


def of_all(verdicts: Sequence[Verdict], reward: float | None, more: bool) -> Verdict:
    """The verdict of an execution from those of its sessions, of which only the last may be no grade.

    `reward` is what the graded ones make together, None when that is no number. `more`: a further session would have
    followed the last one; an execution that was cut so early is tried again.
    """
    last = verdicts[-1]
    if last.outcome != "graded":
        return last
    if more and last.reason == INTERRUPTED:
        return Verdict("retry", INTERRUPTED)
    if reward is None:
        return Verdict("excluded", "grader_failed")
    reasons = [verdict.reason for verdict in verdicts if verdict.reason != "finished"]
    return Verdict("graded", reasons[0] if reasons else "finished", reward)


def _how_it_ended(status: ExitStatus) -> str:
    if status.timed_out:
        return "harness_timeout"
    if status.limit:
        return f"limit_{status.limit}"
    return "finished" if status.code == 0 else "harness_failed"
