"""The reference engine's batch, in process: joins, leaves, aborts, retractions and page reuse never change a number."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, strategies as st

from gyre.engines.reference.batch import Batch, Limits
from gyre.engines.reference.model import Model
from gyre.engines.reference.prefix import PrefixCache, chain
from gyre.engines.reference.sampling import sample
from gyre.engines.reference.sequence import Sequence
from gyre.engines.reference.slots import Shape, Slots

from .place import VOCABULARY, Oracle

LIMITS = Limits(slots=5, context=256, step_tokens=48, cache_tokens=160, page=8)


@pytest.fixture(scope="module")
def model(tiny_model: str) -> Iterator[Model]:
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield Model(tiny_model, torch.float32)


@pytest.fixture(scope="module")
def truth(tiny_model: str) -> Oracle:
    return Oracle(tiny_model)


def drain(batch: Batch) -> None:
    while batch.waiting or batch.live:
        batch.admit()
        batch.step()


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_logprobs_are_a_full_forward(model: Model, truth: Oracle, seed: int) -> None:
    """Random arrivals with shared prefixes, aborts, retractions, flushes, a small cache, chunked prefill."""
    rng = random.Random(seed)
    batch = Batch(model, LIMITS, seed)
    stems = [[rng.randrange(VOCABULARY) for _ in range(rng.choice([5, 40, 100]))] for _ in range(3)]
    everyone: list[Sequence] = []
    for _ in range(60):
        event = rng.random()
        if event < 0.4:
            tail = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 30))]
            salt = rng.choice("ab")
            new = Sequence(
                f"{len(everyone)}", rng.choice(stems) + tail, rng.randint(0, 20), rng.choice([1.0, 0.6]), salt=salt
            )
            new.score = rng.random() < 0.2
            everyone.append(new)
            batch.waiting.append(new)
        elif event < 0.45 and batch.live:
            gone = rng.choice(batch.live)
            gone.finish = {"type": "abort"}
            batch.remove(gone)
        elif event < 0.5:
            batch.retract()
            batch.flush()
        batch.admit()
        batch.step()
        assert [sequence.slot for sequence in batch.live] == list(range(len(batch.live)))
    drain(batch)
    for sequence in everyone:
        assert sequence.done and len(sequence.logprobs) == len(sequence.output) == sequence.published
        if sequence.finish == {"type": "length", "length": len(sequence.output)}:
            assert len(sequence.output) == sequence.max_new_tokens
        if sequence.output:
            wanted = truth.logprobs(sequence.prompt, sequence.output, sequence.temperature)
            assert sequence.logprobs == pytest.approx(wanted, abs=1e-4)
        if sequence.score and sequence.finish != {"type": "abort"} and not sequence.retractions:
            wanted = truth.logprobs(sequence.prompt[:1], sequence.prompt[1:])
            assert sequence.input_logprobs == pytest.approx(wanted, abs=1e-4)


def test_siblings_prefill_their_prompt_once(model: Model) -> None:
    batch = Batch(model, Limits(slots=8, context=256, step_tokens=512, cache_tokens=1024, page=8), 0)
    prompt = list(range(100))
    group = [Sequence(str(at), prompt, 3) for at in range(8)]
    batch.waiting.extend(group)
    drain(batch)
    assert [sequence.cached for sequence in group] == [0] + [96] * 7


def test_a_seed_decides_whatever_the_batch(model: Model) -> None:
    def outputs(beside: int) -> list[int]:
        batch = Batch(model, LIMITS, seed=beside)
        seeded = Sequence("seeded", [1, 2, 3], 16, seed=42)
        batch.waiting.extend([*(Sequence(str(at), [at, 9], 16) for at in range(beside)), seeded])
        drain(batch)
        return seeded.output

    assert outputs(0) == outputs(3)


def test_non_finite_weights_fail_the_request_and_leave_no_trace(model: Model, truth: Oracle) -> None:
    batch = Batch(model, LIMITS, 0)
    name, good = truth.named()[0]
    model.load([(name, torch.full_like(good, float("nan")))])
    sick = [Sequence(str(at), list(range(at, at + 60)), 4) for at in range(3)]
    batch.waiting.extend(sick)
    drain(batch)
    model.load([(name, good)])
    assert {sequence.error and sequence.error[0] for sequence in sick} == {500}
    well = [Sequence(str(at), list(range(at, at + 10 + 20 * at)), 8) for at in range(3)]
    batch.waiting.extend(well)
    drain(batch)
    for sequence in well:
        assert sequence.logprobs == pytest.approx(truth.logprobs(sequence.prompt, sequence.output), abs=1e-4)


def test_a_bad_update_changes_nothing(model: Model, truth: Oracle) -> None:
    before = model.checksum()
    name, good = truth.named()[0]
    for bad in (("model.nothing", good), (truth.named()[1][0], good)):
        with pytest.raises(ValueError, match="parameter|shape"):
            model.load([(name, good + 1), bad])
    assert model.checksum() == before


def test_sampling_follows_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -30.0]]).repeat(40_000, 1)
    ids, logprobs = sample(logits, [2.0] * 40_000, [None] * 40_000, torch.Generator().manual_seed(0))
    wanted = torch.softmax(logits[0] / 2.0, 0)
    seen = torch.bincount(torch.tensor(ids), minlength=4) / len(ids)
    assert torch.allclose(seen, wanted, atol=0.01)
    assert logprobs[0] == pytest.approx(float(wanted[ids[0]].log()), abs=1e-6)


SHAPE = Shape(layers=1, heads=1, head_dim=1, dtype=torch.float32, chosen=1)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=25), st.integers(1, 12))
def test_the_prefix_cache_gives_back_what_was_stored(sequences: list[list[int]], budget: int) -> None:
    """KV and experts here are a function of the whole prefix: any wrong page would show; the budget holds."""
    page = 2
    cache = PrefixCache(SHAPE, budget * page, page)
    for tokens in sequences:
        slots = Slots(SHAPE, 1, 16)
        kv, experts = slots.kv[0], slots.experts[0, :, 0, 0]
        wanted = torch.tensor([float(hash(tuple(tokens[: at + 1])) % 10_007) for at in range(len(tokens))])
        keys: list[bytes] = []
        chain(0, "salt", page, keys, lambda start, end, ids=tokens: ids[start:end], len(tokens))  # type: ignore[misc]
        found = cache.match(keys)
        cache.load(keys[:found], slots, 0)
        assert torch.equal(kv[0, 0, 0, : found * page, 0], wanted[: found * page])
        assert experts[: found * page].tolist() == wanted[: found * page].tolist()
        kv[0, :, 0, : len(tokens), 0] = wanted
        experts[: len(tokens)] = wanted
        cache.store(keys, slots, 0)
        assert len(cache) <= budget
        assert cache.match(keys) == min(len(keys), budget)


def test_other_salts_and_epochs_have_other_keys() -> None:
    made = []
    for epoch, salt in ((0, "a"), (0, "b"), (1, "a")):
        keys: list[bytes] = []
        chain(epoch, salt, 2, keys, lambda start, end: list(range(start, end)), 6)
        made.append(keys)
    assert len({key for keys in made for key in keys}) == 9
