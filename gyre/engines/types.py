"""What the engine client takes and returns: plain values, no HTTP and no torch.

Invariant of a `GenerateChunk`: `output_ids` and `logprobs` have one length, `versions` covers it exactly, and chunks of
one call are cumulative (each starts with the whole of its predecessor).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec

Finish = Literal["stop", "length", "abort"]

RID_LENGTH = 32


class TokenHex(Protocol):
    """A source of unique ids: `secrets.token_hex`, or a seeded stand-in."""

    def __call__(self, nbytes: int, /) -> str: ...


def new_rid(token_hex: TokenHex) -> str:
    """A fresh request id of fixed length.

    SGLang aborts every request whose id *starts with* the given one; ids of one length cannot be prefixes of each
    other.
    """
    rid = token_hex(RID_LENGTH // 2)
    if len(rid) != RID_LENGTH:
        raise ValueError(f"token_hex gave {len(rid)} characters, {RID_LENGTH} are needed")
    return rid


class GenerateRequest(msgspec.Struct, kw_only=True, frozen=True):
    """One model request: token ids in, sampling at a temperature, nothing else that would bend the distribution.

    `input_ids` as array("i") are written to the wire without a Python number for each.
    """

    input_ids: Sequence[int]
    rid: str
    max_new_tokens: int
    temperature: float = 1.0
    stop_token_ids: list[int] = []
    cache_salt: str = ""
    json_schema: str | None = None
    return_routed_experts: bool = False
    ignore_eos: bool = False
    sampling_seed: int | None = None


class GenerateChunk(msgspec.Struct, kw_only=True):
    """The output of a call so far. `finish` is None until the last chunk, which is a `Generation`.

    output_ids: sampled ids, the matched stop token included. logprobs: natural logarithms, of the temperature-scaled
    distribution. versions: runs of (weight version, length) over output_ids; before the end, the engine's version
    at the time of the chunk stands for all. cached_tokens: prompt tokens that came out of the prefix cache.
    """

    output_ids: list[int]
    logprobs: list[float]
    finish: Finish | None = None
    matched: int | None = None
    versions: list[tuple[str, int]] = []
    cached_tokens: int = 0
    prompt_tokens: int = 0
    routed_experts: str | None = None


class Generation(GenerateChunk, kw_only=True):
    """A finished call: `finish` is set. `message` says why it was aborted, if it was."""

    message: str = ""


class EngineLoad(msgspec.Struct, kw_only=True, frozen=True):
    """What an engine has in hand, summed over its data-parallel ranks (requests and tokens)."""

    running: int
    waiting: int
    used_tokens: int
    max_tokens: int

    @property
    def idle(self) -> bool:
        """True if no request is running or waiting."""
        return self.running == 0 and self.waiting == 0


class Parameter(NamedTuple):
    """Where one parameter of an engine's rank lies: its address there, its elements, bytes of each."""

    address: int
    elements: int
    element_bytes: int


class RankMemory(NamedTuple):
    """The memory of one tensor-parallel rank that others may write: by Mooncake, at `session` ("host:port")."""

    session: str
    parameters: dict[str, Parameter]
