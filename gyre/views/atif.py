"""Harbor's Agent Trajectory Interchange Format, version 1.8: the shapes that gyre writes.

Owns the documents' fields, as in `harbor.models.trajectories` (RFC 0001). Invariants: what the format lacks is in
`extra` and nowhere else; a field that does not apply is left out; steps are numbered from 1 in each document.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct, field

VERSION: Literal["ATIF-v1.8"] = "ATIF-v1.8"


class _Part(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """Fields at their defaults are not written."""


class Agent(_Part, kw_only=True):
    name: str
    version: str
    model_name: str | None = None


class ToolCall(_Part, kw_only=True):
    tool_call_id: str
    function_name: str
    arguments: dict[str, Any]


class SubagentRef(_Part, kw_only=True):
    """`trajectory_id` names an entry of the document's `subagent_trajectories`."""

    trajectory_id: str


class Result(_Part, kw_only=True):
    """`source_call_id` is None where the recorded tokens do not say which of several calls it answers."""

    source_call_id: str | None = None
    content: str | None = None
    subagent_trajectory_ref: list[SubagentRef] | None = None


class Observation(_Part, kw_only=True):
    results: list[Result]


class Metrics(_Part, kw_only=True):
    """Of one call. `extra` has context_token_ids, the prompt's new tokens, behind the first `keep` tokens of the whole
    sequence of turn `parent`; and versions, as [lineage, version, tokens].
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    prompt_token_ids: list[int] | None = None
    completion_token_ids: list[int]
    logprobs: list[float]
    extra: dict[str, Any]


class Step(_Part, kw_only=True):
    step_id: int
    timestamp: str | None = None
    """ISO 8601, in UTC"""
    source: Literal["system", "user", "agent"]
    message: str
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    observation: Observation | None = None
    metrics: Metrics | None = None
    is_copied_context: bool | None = None
    """It is in an earlier document too, or was never sampled here: not for training."""
    llm_call_count: int | None = None
    extra: dict[str, Any] | None = None


class FinalMetrics(_Part, kw_only=True):
    """Over the document's steps that are not copied."""

    total_prompt_tokens: int
    total_completion_tokens: int
    total_cached_tokens: int
    total_steps: int


class Trajectory(_Part, kw_only=True):
    schema_version: Literal["ATIF-v1.8"]
    session_id: str
    trajectory_id: str
    agent: Agent
    steps: list[Step]
    notes: str | None = None
    final_metrics: FinalMetrics
    continued_trajectory_ref: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    subagent_trajectories: list[Trajectory] | None = None
