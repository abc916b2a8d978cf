"""What tests of several rooms share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# A deadline would be an assertion on the machine's load. The same tree draws the same examples, so that a change is not
# refused for what it did not touch; GYRE_EXPLORE=1 draws new ones.
settings.register_profile("gyre", deadline=None, derandomize="GYRE_EXPLORE" not in os.environ)
settings.load_profile("gyre")


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GYRE_CACHE for runs under test: the environment's, else a folder beside pytest's own that outlives the session.

    The small model of recipes/short.toml is built in it once.
    """
    given = os.environ.get("GYRE_CACHE")
    return Path(given) if given else tmp_path_factory.getbasetemp().parent / "gyre-cache"
