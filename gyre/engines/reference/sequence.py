"""One request inside the reference engine: what it asked for and how far it is.

The compute thread alone changes a sequence. Readers on the event loop see a consistent prefix: `published` is
raised only after the tokens, log-probabilities and versions below it are in place, and `finish` after the last
`published`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(slots=True, eq=False)
class Sequence:
    """`length` counts the tokens whose KV is in the slot; the rest of prompt + output is still to be computed."""

    rid: str
    prompt: list[int]
    max_new_tokens: int
    temperature: float = 1.0
    stop_ids: frozenset[int] = frozenset()
    salt: str = ""
    seed: int | None = None
    score: bool = False
    experts_from: int | None = None
    """First position whose experts are wanted."""
    reader: Any = None

    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[str, int]] = field(default_factory=list)
    input_logprobs: list[float] = field(default_factory=list)
    published: int = 0
    experts: bytes | None = None
    """int32 rows from `experts_from` to the last token but one, once it has finished."""
    finish: dict[str, Any] | None = None
    error: tuple[int, str] | None = None

    slot: int = -1
    length: int = 0
    admitted: bool = False
    cached: int = 0
    retractions: int = 0
    keys: list[bytes] = field(default_factory=list)
    epoch: int = -1
    generator: torch.Generator | None = None

    @property
    def size(self) -> int:
        """Tokens of prompt and output together."""
        return len(self.prompt) + len(self.output)

    @property
    def done(self) -> bool:
        """True once it has a finish reason or an error."""
        return self.finish is not None or self.error is not None

    def tokens(self, start: int, end: int) -> list[int]:
        """Tokens [start, end) of prompt + output."""
        at = len(self.prompt)
        if start >= at:
            return self.output[start - at : end - at]
        if end <= at:
            return self.prompt[start:end]
        return self.prompt[start:] + self.output[: end - at]

    def append(self, token: int, logprob: float, version: str) -> None:
        """Take one sampled token."""
        self.logprobs.append(logprob)
        if self.versions and self.versions[-1][0] == version:
            self.versions[-1] = (version, self.versions[-1][1] + 1)
        else:
            self.versions.append((version, 1))
        self.output.append(token)
        self.published += 1
