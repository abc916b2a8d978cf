"""Can the exploration find anything? Each mutant of the protocol must be caught by it, within a budget of histories."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import Phase

from tests.protocol.mutants import MUTANTS, Patch
from tests.protocol.test_machine import CHUNK, explore

BUDGET = 400
"""Chunks of histories. What hypothesis draws depends on the modules that are loaded, too, so a chunk that found a
mutant may find nothing in another session. The rarest mutant was found in about one of 40."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_is_caught(mutant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        for number in range(BUDGET):
            explore((MUTANTS[mutant] + number) % BUDGET, steps=20, phases=(Phase.generate,))
            print(f"{(number + 1) * CHUNK} histories of {mutant.__name__}, and nothing found")
