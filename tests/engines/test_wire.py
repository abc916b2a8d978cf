"""The client's reading of SGLang's JSON, on recorded shapes; request ids; buckets; keys. No engine, no network."""

from __future__ import annotations

import base64
import json
import os
import pickle
from array import array
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, strategies as st

from gyre.engines.errors import EngineRefused, EngineUnavailable
from gyre.engines.push import buckets, serialize_bucket
from gyre.engines.reference.auth import Keys, read_keys
from gyre.engines.reference.pickles import read_bucket
from gyre.engines.types import EngineLoad, GenerateRequest, Generation, new_rid
from gyre.engines.wire import (
    chunk_of,
    decode_loads,
    decode_reply,
    encode_generate,
    error_message,
    expert_numbers,
    generate_body,
)
from gyre.errors import UserError

from .place import write_keys

REPLY = {
    "text": "x",
    "output_ids": [7, 2],
    "meta_info": {
        "id": "r",
        "finish_reason": {"type": "stop", "matched": 2},
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "cached_tokens": 4,
        "weight_version": "new",
        "weight_versions": [{"version": "old", "start": 0, "end": 1}, {"version": "new", "start": 1, "end": 2}],
        "output_token_logprobs": [[-0.5, 7, None], [-1.25, 2, None]],
        "input_token_logprobs": [],
        "a_field_of_tomorrow": {"x": 1},
    },
}


def decoded(value: object) -> Generation:
    chunk = chunk_of(decode_reply(msgspec.json.encode(value)))
    assert isinstance(chunk, Generation)
    return chunk


def test_a_finished_reply() -> None:
    got = decoded(REPLY)
    assert (got.output_ids, got.logprobs, got.finish, got.matched) == ([7, 2], [-0.5, -1.25], "stop", 2)
    assert (got.versions, got.cached_tokens, got.prompt_tokens) == ([("old", 1), ("new", 1)], 4, 5)


def test_a_chunk_takes_the_version_of_its_moment() -> None:
    meta = {**REPLY["meta_info"], "finish_reason": None, "weight_versions": None}  # type: ignore[dict-item]
    chunk = chunk_of(decode_reply(msgspec.json.encode({**REPLY, "meta_info": meta})))
    assert not isinstance(chunk, Generation) and chunk.finish is None
    assert chunk.versions == [("new", 2)]


def test_an_abort_in_the_queue_has_no_prompt_tokens() -> None:
    reason = {"type": "abort", "message": "Abort in waiting queue", "status_code": None, "err_type": None}
    got = decoded({"text": "", "output_ids": [], "meta_info": {"id": "r", "finish_reason": reason}})
    assert (got.finish, got.output_ids, got.versions, got.message) == ("abort", [], [], "Abort in waiting queue")


@pytest.mark.parametrize(("status", "kind"), [(400, EngineRefused), (503, EngineUnavailable)])
def test_an_abort_that_the_engine_chose_is_an_error(status: int, kind: type[Exception]) -> None:
    reason = {"type": "abort", "message": "full", "status_code": status, "err_type": "X"}
    with pytest.raises(kind, match="full"):
        decoded({"output_ids": [], "meta_info": {"finish_reason": reason}})


@pytest.mark.parametrize(
    "broken",
    [
        {"output_ids": [7]},
        {"meta_info": {**REPLY["meta_info"], "weight_versions": [{"version": "v", "start": 0, "end": 1}]}},  # type: ignore[dict-item]
        {"meta_info": {**REPLY["meta_info"], "finish_reason": {"type": "surprise"}}},  # type: ignore[dict-item]
        {"meta_info": None},
    ],
)
def test_a_reply_that_contradicts_itself_is_not_used(broken: dict[str, object]) -> None:
    with pytest.raises(EngineUnavailable):
        decoded({**REPLY, **broken})


def test_the_request_pins_the_distribution() -> None:
    request = GenerateRequest(
        input_ids=[1], rid="r", max_new_tokens=3, temperature=0.7, cache_salt="s", stop_token_ids=[2]
    )
    body = generate_body(request, stream=True)
    sampling = body["sampling_params"]
    assert (sampling["top_p"], sampling["top_k"], sampling["temperature"]) == (1.0, -1, 0.7)
    assert not {name for name in sampling if "penalty" in name}
    assert (body["return_logprob"], body["stream"], body["cache_salt"], body["input_ids"]) == (True, True, "s", [1])
    assert "return_routed_experts" not in body and "json_schema" not in sampling
    routed = msgspec.structs.replace(request, return_routed_experts=True, routed_experts_start=5)
    assert generate_body(routed, stream=True) == {
        **body, "return_routed_experts": True, "routed_experts_start_len": 5,
    }  # fmt: skip


def test_experts_that_cannot_be_read_are_none() -> None:
    assert expert_numbers("AQAAAAIAAAA=").tolist() == [1, 2]
    assert [len(expert_numbers(text)) for text in ("AQAAAA", "AQAAAAI=", "?", "\u00e9")] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "ids",
    [
        [0],
        [9, 10, 99, 100, 999, 1000, 9999, 10_000, 99_999, 100_000, 65_535, 65_536],
        [999_999, 1_000_000, (1 << 22) - 1, 0],
        [1 << 22, 5],
        [2**31 - 1],
        [3, -1],
        [],
    ],
)
def test_ids_in_an_array_are_written_as_those_in_a_list(ids: list[int]) -> None:
    request = GenerateRequest(input_ids=array("i", ids), rid="r", max_new_tokens=3)
    expected = {**generate_body(request, stream=True), "input_ids": ids}
    assert json.loads(encode_generate(request, stream=True)) == expected


def test_loads_sum_over_ranks() -> None:
    row = {"num_running_reqs": 2, "num_waiting_reqs": 1, "num_used_tokens": 10, "max_total_num_tokens": 100, "new": 0}
    data = msgspec.json.encode({"timestamp": "t", "version": "v", "loads": [row, row]})
    assert decode_loads(data) == EngineLoad(running=4, waiting=2, used_tokens=20, max_tokens=200)


@pytest.mark.parametrize(
    "body", [b'{"error":{"message":"why"}}', b'{"error":"why"}', b'{"message":"why"}', b'{"detail":"why"}', b"why"]
)
def test_every_error_form_gives_its_message(body: bytes) -> None:
    assert error_message(body) == "why"


def test_rids_have_one_length() -> None:
    assert len(new_rid(lambda count: "a" * 2 * count)) == 32
    with pytest.raises(ValueError, match="32"):
        new_rid(lambda count: "a")


@given(st.lists(st.integers(1, 40), max_size=20), st.integers(1, 100))
def test_buckets_keep_order_and_bound(sizes: list[int], size: int) -> None:
    named = [(str(at), torch.zeros(count, dtype=torch.uint8)) for at, count in enumerate(sizes)]
    made = list(buckets(named, size))
    assert [name for bucket in made for name, _ in bucket] == [name for name, _ in named]
    for bucket in made:
        assert len(bucket) == 1 or sum(tensor.numel() for _, tensor in bucket) <= size
    for left, right in pairwise(made):
        assert sum(t.numel() for _, t in left) + right[0][1].numel() > size


def test_a_bucket_survives_and_carries_only_itself() -> None:
    whole = torch.arange(100_000, dtype=torch.float32)
    named = [
        ("view", whole[10:20]),
        ("bf16", torch.randn(3, 4).to(torch.bfloat16)),
        ("turned", torch.arange(6).reshape(2, 3).T),
        ("parameter", torch.nn.Parameter(torch.ones(2))),
    ]
    encoded = serialize_bucket(named)
    assert len(encoded) < 20_000
    for (name, wanted), (got_name, got) in zip(named, read_bucket(encoded), strict=True):
        assert name == got_name and got.dtype == wanted.dtype and torch.equal(got, wanted)


class Hostile:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch /tmp/gyre-was-here",)


@pytest.mark.parametrize("value", [Hostile(), [("w", Hostile())], [("w", 3)], {"w": torch.ones(1)}, [("w",)]])
def test_a_hostile_or_odd_bucket_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="serialized tensors"):
        read_bucket(base64.b64encode(pickle.dumps(value)).decode())


def test_a_hostile_storage_is_refused() -> None:
    """The bytes inside a tensor's storage are a pickle of their own."""

    class Storage:
        def __reduce__(self) -> tuple[object, tuple[bytes]]:
            return torch.storage._load_from_bytes, (pickle.dumps(Hostile(), protocol=2),)

    with pytest.raises(ValueError, match="serialized tensors"):
        read_bucket(base64.b64encode(pickle.dumps([("w", Storage())])).decode())
    for garbage in ("!!!", "", base64.b64encode(b"\x80").decode()):
        with pytest.raises(ValueError, match="serialized tensors"):
            read_bucket(garbage)


def test_keys_come_from_a_private_file(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "keys", {"api_key": "a", "admin_key": "b"})
    assert read_keys(str(path)) == Keys("a", "b")
    assert read_keys(None) == Keys()
    path.chmod(0o644)
    with pytest.raises(UserError, match="chmod 600"):
        read_keys(str(path))
    with pytest.raises(UserError, match="No such file"):
        read_keys(str(tmp_path / "absent"))
