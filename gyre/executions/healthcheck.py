"""A task's healthcheck: a command that must succeed in the sandbox before the harness starts there.

Owns its settings and the bash that runs it, as Docker's HEALTHCHECK counts: failures in the start period are free,
after it `retries` are too many. Invariant: a harness never starts in an environment that was not healthy, and that is
the environment's failure, not the agent's.
"""

from __future__ import annotations

import math
import shlex

from msgspec import Struct

UNHEALTHY = 86
"""How the bash ends then; a harness that ends so itself has made calls by then."""


class Healthcheck(Struct, frozen=True, kw_only=True):
    """Times in seconds; the defaults are Harbor's."""

    command: str
    interval_sec: float = 5.0
    timeout_sec: float = 30.0
    start_period_sec: float = 0.0
    start_interval_sec: float = 5.0
    retries: int = 3

    @property
    def problem(self) -> str:
        """What is wrong with the settings, or ""."""
        times = (self.interval_sec, self.timeout_sec, self.start_period_sec, self.start_interval_sec)
        if not self.command.strip():
            return "command is empty"
        if self.retries < 1:
            return "retries must be 1 or more"
        return "" if all(0 <= seconds < math.inf for seconds in times) else "its times must be numbers of seconds"

    def script(self) -> str:
        """Bash that returns once the command succeeded, and else ends with UNHEALTHY."""
        return f"""
gyre_failed=0 SECONDS=0
until timeout {self.timeout_sec:g} bash -c {shlex.quote(self.command)}; do
    if (( SECONDS >= {math.ceil(self.start_period_sec)} )); then
        if (( ++gyre_failed >= {self.retries} )); then
            echo "healthcheck failed $gyre_failed times" >&2
            exit {UNHEALTHY}
        fi
        sleep {self.interval_sec:g}
    else
        sleep {self.start_interval_sec:g}
    fi
done
"""
