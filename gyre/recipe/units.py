"""Durations as people write them. Owns the one parser; once loaded, every duration is a number of seconds."""

from __future__ import annotations

import math
import re

_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_seconds(value: object) -> float:
    """Seconds of a number, or of a string such as "90s", "10m", "2h", "1h30m", "250ms".

    Raises ValueError that says what is expected.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    elif isinstance(value, str) and _PART.sub("", value).strip() == "" and _PART.search(value):
        seconds = sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(value))
    else:
        raise ValueError(f'expected seconds or a duration such as "90s", "10m" or "2h", got {value!r}')
    if not math.isfinite(seconds) or seconds < 0:
        raise ValueError(f"expected a duration that is finite and not negative, got {value!r}")
    return seconds


def format_seconds(seconds: float) -> str:
    """A duration for people, in the largest unit that gives a whole number: 7200 -> "2h", 90 -> "90s"."""
    for unit in ("d", "h", "m"):
        if seconds >= _SECONDS[unit] and seconds % _SECONDS[unit] == 0:
            return f"{seconds / _SECONDS[unit]:.0f}{unit}"
    return f"{seconds:.0f}s" if seconds == int(seconds) else f"{seconds:.3f}s"
