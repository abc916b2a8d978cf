"""Fixtures of the tests against real SGLang: its environment, and one server that they share.

`gyre engine install sglang` runs at first use (minutes, into the user's cache); `make test-slow` does it before.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gyre.engines.sglang.install import install
from tests.engines.place import Oracle, Place
from tests.sglang.server import WEIGHTS_KEY, Server, launch, make_served_model

pytest.register_assert_rewrite("tests.engines.test_conformance")

WRITABLE: dict[str, Any] = {"executions_per_cell": 16, "weights": "mooncake"}
"""Recipe of the shared servers: room for sixteen calls, and memory that others may write."""


@pytest.fixture(scope="session")
def installed() -> None:
    """SGLang's environment is there."""
    install(print)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of the weights that servers start with."""
    return make_served_model(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of other weights of the same shape."""
    return make_served_model(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture(scope="session")
def server(installed: None, tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> Iterator[Server]:
    """The shared server: sixteen slots, context 4096, and memory that others may write. A test leaves it with the
    weights that it found."""
    folder = tmp_path_factory.mktemp("sglang") / "shared"
    made = launch(folder, tiny_model, "--chunked-prefill-size", "256", weights_key=WEIGHTS_KEY, **WRITABLE)
    try:
        yield made.wait_ready()
    finally:
        made.stop()


@pytest.fixture(scope="session")
def place(server: Server) -> Place:
    """Where the shared server is, for the conformance suite."""
    return server.place


@pytest.fixture(scope="session")
def oracle(place: Place) -> Oracle:
    """Log-probabilities by transformers' own full forward of the server's first weights."""
    return Oracle(place.model)


@pytest.fixture(scope="session")
def second(installed: None, tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> Iterator[Server]:
    """Another server of the same model, on two tensor-parallel ranks, with room for sixteen calls."""
    folder = tmp_path_factory.mktemp("sglang") / "second"
    made = launch(folder, tiny_model, tensor_parallel=2, weights_key=WEIGHTS_KEY, **WRITABLE)
    try:
        yield made.wait_ready()
    finally:
        made.stop()


@pytest.fixture(scope="session")
def other_oracle(other_model: str) -> Oracle:
    """The same for the other weights."""
    return Oracle(other_model)
