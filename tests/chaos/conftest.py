"""Runs under test: each is ended, whatever its test came to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.chaos.harness import Drill


@pytest.fixture
def drills(tmp_path: Path, cache: Path) -> Iterator[Callable[..., Drill]]:
    """Makes runs; all are stopped at the end."""
    made: list[Drill] = []

    def make(home: Path | None = None, **options: object) -> Drill:
        drill = Drill(home or tmp_path / f"runs-{len(made)}", cache, **options)  # type: ignore[arg-type]
        drill.home.mkdir(exist_ok=True)
        made.append(drill)
        return drill

    yield make
    for drill in made:
        drill.stop()
