"""One row of a trajectory shard: what the ledger keeps of a model call.

Owns the table `turns`: its fields, its Arrow schema and the schema's version.
Invariant: only new tokens are stored. The whole sequence of a turn is its parent's whole sequence cut to `keep`
tokens, then `context`, then `output`; so an execution costs what it sampled and read, not calls times context.
"""

from __future__ import annotations

import msgspec
import pyarrow as pa

SCHEMA_VERSION = 1

ROLES = ("main", "main-summary", "sub-agent", "sub-agent-summary", "auxiliary")
STATUSES = ("committed", "undelivered", "aborted")
ROOT = -1


class Span(msgspec.Struct, frozen=True, array_like=True):
    """`length` output tokens in a row that were sampled with one version of the weights."""

    lineage: int
    version: int
    length: int


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One call. Token ids are ints in the model's vocabulary; times are seconds since the epoch, for display only.

    `turn` counts from 0 inside (execution, attempt); `parent` is a lower turn or -1 for a root.
    `keep`: how many tokens of the parent's whole sequence this turn keeps (0 for a root).
    The parent is the deepest turn that contains position `keep` (or whose sequence ends there).
    `len(logprobs) == len(output) == sum(span.length for span in spans)`.
    """

    execution: str
    attempt: int
    turn: int
    parent: int = ROOT
    keep: int = 0
    thread: str = "main"
    role: str = "main"
    evidence: str = ""
    context: list[int] = []
    output: list[int] = []
    logprobs: list[float] = []
    spans: list[Span] = []
    temperature: float = 1.0
    finish: str = "stop"
    """stop (the model ended), length, abort."""
    constrained: bool = False
    """sampled under a grammar or a forced tool choice: never a target."""
    status: str = "committed"
    started: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0
    cell: str = ""
    cached_tokens: int = 0
    request_digest: str = ""


ARROW_SCHEMA = pa.schema(
    [
        ("execution", pa.string()),
        ("attempt", pa.int32()),
        ("turn", pa.int32()),
        ("parent", pa.int32()),
        ("keep", pa.int32()),
        ("thread", pa.string()),
        ("role", pa.string()),
        ("evidence", pa.string()),
        ("context", pa.list_(pa.int32())),
        ("output", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        (
            "spans",
            pa.list_(pa.struct([("lineage", pa.int32()), ("version", pa.int32()), ("length", pa.int32())])),
        ),
        ("temperature", pa.float32()),
        ("finish", pa.string()),
        ("constrained", pa.bool_()),
        ("status", pa.string()),
        ("started", pa.float64()),
        ("first_token", pa.float64()),
        ("finished", pa.float64()),
        ("cell", pa.string()),
        ("cached_tokens", pa.int32()),
        ("request_digest", pa.string()),
    ],
    metadata={"gyre.table": "turns", "gyre.schema": str(SCHEMA_VERSION)},
)
