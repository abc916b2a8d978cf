"""Fixtures of the engine tests: the tiny models, one running engine, and the oracle for it.

Set GYRE_TEST_SGLANG_URL (with GYRE_TEST_SGLANG_MODEL, GYRE_TEST_SGLANG_API_KEY, GYRE_TEST_SGLANG_ADMIN_KEY) to run the
conformance suite against a real SGLang server of a fp32 model instead.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from .place import VOCABULARY, Oracle, Place, make_model, start_engine, stop_engine

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of the weights that the engine starts with."""
    return make_model(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of other weights of the same shape."""
    if os.environ.get("GYRE_TEST_SGLANG_URL"):
        pytest.skip("there are no other weights of this model")
    return make_model(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Place]:
    """The engine under test: eight slots, context 4096."""
    url = os.environ.get("GYRE_TEST_SGLANG_URL")
    if url:
        keys = [os.environ.get(f"GYRE_TEST_SGLANG_{name}_KEY") for name in ("API", "ADMIN")]
        model = os.environ["GYRE_TEST_SGLANG_MODEL"]
        config = json.loads((Path(model) / "config.json").read_text())
        yield Place(url, keys[0], keys[1], model, config["vocab_size"], real=True)
        return
    model = request.getfixturevalue("tiny_model")
    folder = tmp_path_factory.mktemp("engine")
    process, url = start_engine(folder, model, "--max-running-requests", "8", "--chunked-prefill-size", "256")
    yield Place(url, "api", "admin", model, VOCABULARY)
    stop_engine(process)


@pytest.fixture(scope="session")
def oracle(place: Place) -> Oracle:
    """Log-probabilities by transformers' own full forward of the engine's first weights."""
    return Oracle(place.model)
