"""A line of an fstab: what `mount --fstab` and enroot-mount read.

Owns its escapes. Invariant: whatever the paths hold, a line has four words.
"""

from __future__ import annotations


def entry(source: str, target: str, kind: str, options: str) -> str:
    """One line, without its end."""
    words = (source, target, kind, options)
    return " ".join("".join(f"\\{ord(c):03o}" if c in " \t\n\\" else c for c in word) for word in words)
