"""What the command line asks of a run, through the ledger.

Owns the journal `control`. Invariant: the command line never acts on a process; it asks, and the scheduler decides.
"""

from __future__ import annotations

import time

from gyre.ledger import events as ev
from gyre.ledger.journal import Journal
from gyre.ledger.layout import RunFolder


def request_cancel(run: RunFolder, now: bool = False, leaving: bool = False) -> None:
    """`leaving`: it is the job that ends, and the run goes on later."""
    _say(run, ev.CancelRequested(now=now, leaving=leaving))


def request_resume(run: RunFolder) -> None:
    _say(run, ev.ResumeRequested())


def _say(run: RunFolder, event: ev.Event) -> None:
    journal = Journal.open(run, "control", time.time)
    journal.append(event)
    journal.close()
