"""The laboratory's fixtures; see `lab.py`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    # For `tests`.
    sys.path.insert(0, str(ROOT))


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The renderer of a small model that opens its thinking itself."""
    from gyre.proxy.template import load
    from tests.proxy.conftest import THINKING, model_folder

    folder = model_folder(tmp_path_factory.mktemp("model"), "{%- set opening = '' -%}" + THINKING.read_text())
    return load(folder, "qwen3", nonce="test-nonce")


@pytest.fixture
def lab(tmp_path: Path, hybrid: Any) -> Iterator[Any]:
    from gyre.executions.layers import remove_tree
    from tests.harnesses.lab import Lab

    yield Lab(tmp_path, hybrid)
    remove_tree(tmp_path / "executions")
