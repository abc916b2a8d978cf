"""The reference engine says which experts each token went to, however its rows were computed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gyre.engines.reference.batch import Batch, Limits
from gyre.engines.reference.model import Model
from gyre.engines.reference.replies import BadRequest, GenerateBody, SamplingParams, reply_of, sequence_of
from gyre.engines.reference.sequence import Sequence
from gyre.engines.wire import expert_numbers
from tests.engines.place import Oracle

LAYERS, EXPERTS, CHOSEN = 2, 4, 2
TWO = SamplingParams(max_new_tokens=2)
LIMITS = Limits(slots=3, context=64, step_tokens=7, cache_tokens=64, page=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = tmp_path_factory.mktemp("moe")
    torch.manual_seed(3)
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_attention_heads": 2, "head_dim": 8, "num_key_value_heads": 1}
    config = Qwen3MoeConfig(
        num_hidden_layers=LAYERS, moe_intermediate_size=8, num_experts=EXPERTS, num_experts_per_tok=CHOSEN, **sizes
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return Model(str(folder), torch.float32)


def asked(prompt: list[int], start: int, new: int = 9) -> Sequence:
    params = SamplingParams(max_new_tokens=new)
    body = GenerateBody(
        input_ids=prompt, return_routed_experts=True, routed_experts_start_len=start, sampling_params=params
    )
    return sequence_of(body, "rid", 50, LIMITS.context, frozenset(), dense=False)


def run(batch: Batch, sequences: list[Sequence], retract_at: int = -1) -> None:
    batch.waiting.extend(sequences)
    steps = 0
    with torch.inference_mode():
        while not all(each.done for each in sequences):
            if steps == retract_at:
                batch.retract()
            batch.admit()
            batch.step()
            steps += 1


def assert_told(model: Model, sequence: Sequence) -> None:
    """In the reply, for each position from the start that was asked for to the last but one."""
    meta = reply_of(sequence, sequence.published, True, False, "v")["meta_info"]
    assert sequence.experts_from is not None
    whole = sequence.prompt + sequence.output
    rows = len(whole) - 1 - sequence.experts_from
    found = expert_numbers(meta["routed_experts"]).reshape(rows, LAYERS, CHOSEN)
    wanted = Oracle(model.path).experts(whole[:-1], CHOSEN)
    assert np.array_equal(np.sort(found, axis=-1), wanted[sequence.experts_from :])


@pytest.mark.parametrize("retract_at", [-1, 4])
def test_prefill_in_parts_decoding_and_moved_slots(model: Model, retract_at: int) -> None:
    batch = Batch(model, LIMITS, seed=1)
    sequences = [asked(list(range(1, 21)), 0), asked([7, 8, 9], 3, new=3), asked(list(range(30, 45)), 5, new=14)]
    run(batch, sequences, retract_at)
    for each in sequences:
        assert_told(model, each)


def test_a_prefix_from_the_cache_brings_its_experts(model: Model) -> None:
    batch = Batch(model, LIMITS, seed=1)
    first = asked(list(range(1, 21)), 0)
    run(batch, [first])
    second = asked(first.prompt + first.output[:4] + [3, 4], 2)
    run(batch, [second])
    assert second.cached >= 20
    assert_told(model, second)


def test_only_of_a_mixture_and_from_a_position_that_is_there() -> None:
    for start, dense in ((0, True), (4, False), (-1, False)):
        body = GenerateBody(
            input_ids=[1, 2, 3], return_routed_experts=True, routed_experts_start_len=start, sampling_params=TWO
        )
        with pytest.raises(BadRequest, match="routed experts are of a mixture"):
            sequence_of(body, "rid", 50, 64, frozenset(), dense)


def test_nobody_is_told_who_did_not_ask(model: Model) -> None:
    batch = Batch(model, LIMITS, seed=1)
    body = GenerateBody(input_ids=[1, 2, 3], sampling_params=TWO)
    sequence = sequence_of(body, "rid", 50, 64, frozenset(), dense=False)
    run(batch, [sequence])
    assert "routed_experts" not in reply_of(sequence, 2, True, False, "v")["meta_info"]
