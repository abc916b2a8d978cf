"""What `gyre doctor` finds: one line each, and what to do about it.

Invariant: a failure is what stops a run; a warning is what makes it slower or less safe.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warning", "failure"]


@dataclass(frozen=True)
class Finding:
    verdict: Verdict
    what: str
    advice: str = ""

    def line(self) -> str:
        return f"{self.verdict:7}  {self.what}" + (f": {self.advice}" if self.advice else "")


def ok(what: str) -> Finding:
    return Finding("ok", what)


def warning(what: str, advice: str) -> Finding:
    return Finding("warning", what, advice)


def failure(what: str, advice: str) -> Finding:
    return Finding("failure", what, advice)


def failed(findings: Iterable[Finding]) -> bool:
    return any(finding.verdict == "failure" for finding in findings)
