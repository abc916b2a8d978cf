"""The reference engine's JSON, in SGLang's shapes. Pure: sequences and bodies in, plain values out."""

from __future__ import annotations

import base64
from typing import Any

import msgspec

from gyre.engines.reference.sequence import Sequence


class BadRequest(Exception):
    """A body that is refused with HTTP 400; the message says why."""


class SamplingParams(msgspec.Struct):
    """`sampling_params`: what the reference engine honours, and what it has to see to refuse it."""

    max_new_tokens: int | None = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    n: int = 1
    sampling_seed: int | None = None
    stop: str | list[str] | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None


class GenerateBody(msgspec.Struct):
    """The body of `/generate`; unknown fields are ignored."""

    input_ids: list[int]
    rid: str | None = None
    sampling_params: SamplingParams = msgspec.field(default_factory=SamplingParams)
    return_logprob: bool = False
    logprob_start_len: int = -1
    stream: bool = False
    cache_salt: str | None = None
    extra_key: str | None = None
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0


def sequence_of(
    body: GenerateBody, rid: str, vocabulary: int, context: int, eos: frozenset[int], dense: bool = True
) -> Sequence:
    """The sequence that a body asks for. Raises BadRequest for what cannot be honoured exactly."""
    params = body.sampling_params
    new = 128 if params.max_new_tokens is None else params.max_new_tokens
    _check_sampling(params, new)
    _check_prompt(body.input_ids, new, vocabulary, context)
    if body.logprob_start_len not in (-1, 0):
        raise BadRequest("logprob_start_len must be -1 (outputs only) or 0 (the whole prompt)")
    if body.return_routed_experts and (dense or not 0 <= body.routed_experts_start_len <= len(body.input_ids)):
        raise BadRequest("routed experts are of a mixture of experts, from a position in the prompt or its end")
    stop = frozenset() if params.ignore_eos else eos | frozenset(params.stop_token_ids or [])
    return Sequence(
        rid=rid,
        prompt=body.input_ids,
        max_new_tokens=new,
        temperature=params.temperature,
        stop_ids=stop,
        salt=f"{body.extra_key or ''}\0{body.cache_salt or ''}",
        seed=params.sampling_seed,
        score=body.return_logprob and body.logprob_start_len == 0,
        experts_from=body.routed_experts_start_len if body.return_routed_experts else None,
    )


def _check_sampling(params: SamplingParams, new: int) -> None:
    if new < 0:
        raise BadRequest(f"max_new_tokens must be at least 0, got {new}.")
    if params.temperature < 0.0:
        raise BadRequest(f"temperature must be non-negative, got {params.temperature}.")
    neutral = {
        "top_p": (params.top_p, 1.0),
        "top_k": (params.top_k, -1),
        "min_p": (params.min_p, 0.0),
        "frequency_penalty": (params.frequency_penalty, 0.0),
        "presence_penalty": (params.presence_penalty, 0.0),
        "repetition_penalty": (params.repetition_penalty, 1.0),
        "n": (params.n, 1),
    }
    for name, (value, wanted) in neutral.items():
        if value != wanted:
            raise BadRequest(
                f"the reference engine samples the full distribution: {name} must be {wanted}, got {value}."
            )
    for name in ("stop", "json_schema", "regex", "ebnf"):
        if getattr(params, name):
            raise BadRequest(f"the reference engine has no {name}.")


def _check_prompt(ids: list[int], new: int, vocabulary: int, context: int) -> None:
    if not ids:
        raise BadRequest("input_ids must not be empty.")
    if min(ids) < 0 or max(ids) >= vocabulary:
        raise BadRequest(f"input_ids contains an id outside the vocabulary of {vocabulary}.")
    if len(ids) >= context:
        raise BadRequest(f"The input ({len(ids)} tokens) is longer than the model's context length ({context} tokens).")
    if len(ids) + new > context:
        raise BadRequest(
            f"Requested token count exceeds the model's maximum context length of {context} tokens. "
            f"You requested a total of {len(ids) + new} tokens: {len(ids)} tokens from the input messages and "
            f"{new} tokens for the completion."
        )


def reply_of(sequence: Sequence, count: int, done: bool, logprobs: bool, version: str) -> dict[str, Any]:
    """The answer with the first `count` output tokens; `done` adds the finish reason and the version spans."""
    meta: dict[str, Any] = {
        "id": sequence.rid,
        "finish_reason": sequence.finish if done else None,
        "completion_tokens": count,
        "cached_tokens": sequence.cached,
        "cached_tokens_details": None,
        "num_retractions": sequence.retractions,
        "weight_version": version,
        "dp_rank": None,
    }
    if sequence.admitted:
        meta["prompt_tokens"] = len(sequence.prompt)
    if logprobs:
        rows = zip(sequence.logprobs[:count], sequence.output[:count], strict=True)
        meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in rows]
        meta["output_token_logprobs_length"] = count
        meta["input_token_logprobs"] = _input_rows(sequence) if done else []
    if done:
        meta["weight_versions"] = _spans(sequence.versions)
        if sequence.experts is not None:
            meta["routed_experts"] = base64.b64encode(sequence.experts).decode()
    return {"text": "", "output_ids": sequence.output[:count], "meta_info": meta}


def _input_rows(sequence: Sequence) -> list[list[Any]]:
    if not sequence.score:
        return []
    first: list[Any] = [None, sequence.prompt[0], None]
    scored = zip(sequence.input_logprobs, sequence.prompt[1:], strict=False)
    return [first, *([logprob, token, None] for logprob, token in scored)]


def _spans(versions: list[tuple[str, int]]) -> list[dict[str, Any]]:
    spans: list[dict[str, Any]] = []
    start = 0
    for version, count in versions:
        spans.append({"version": version, "start": start, "end": start + count})
        start += count
    return spans


def checksum_reply(found: dict[str, Any]) -> dict[str, Any]:
    """The answer of `/weights_checker` for one rank."""
    rank = {
        "checksums": found["checksums"],
        "per_gpu_checksum": found["digest"],
        "parallelism_info": [{"role": "target", "tp_rank": 0, "tp_size": 1}],
    }
    return {"success": True, "message": "Success", "ranks": [rank], "per_engine_checksum": found["digest"]}
