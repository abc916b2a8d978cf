"""`gyre verify` of recorded experts: rows that are not their turn's, or not the model's, are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gyre.ledger.routing import Routing, RoutingWriter
from gyre.ledger.turns import Span, Turn
from gyre.views.audit_files import Audited, routing
from tests.views.ledgers import WORKER, Ledger

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 8,
    "num_attention_heads": 2, "vocab_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
}  # fmt: skip
FIELDS = {"turn": 1, "start": 3, "layers": 2, "chosen": 2, "item_size": 1, "experts": bytes(4 * 3)}


def problems(folder: Path, **told: Any) -> list[str]:
    """What is wrong with a record of a turn that keeps 4 tokens and has 3 of its own."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    ledger = Ledger(folder, model=str(folder))
    plain = {"logprobs": [-0.5], "spans": [Span(1, 1, 1)]}
    first = Turn(execution="e", attempt=1, turn=0, context=[1, 2, 3], output=[4], **plain)
    second = Turn(execution="e", attempt=1, turn=1, parent=0, keep=4, context=[5, 6], output=[7], **plain)
    ledger.record([first, second])
    RoutingWriter(ledger.run, WORKER, 1).append(Routing(execution="e", attempt=1, **{**FIELDS, **told}))
    opened = ledger.opened()
    return [problem for _, problem in routing(Audited(opened.run, opened.recipe, opened.job, opened.view))]


def test_rows_of_their_turn(tmp_path: Path) -> None:
    assert problems(tmp_path) == [""]


@pytest.mark.parametrize("told", [{"experts": bytes(4)}, {"turn": 2}, {"turn": 0, "start": 0}])
def test_fewer_rows_and_a_record_without_its_turn_are_sound(tmp_path: Path, told: dict[str, Any]) -> None:
    assert problems(tmp_path, **told) == [""]


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"start": 4}, "start at 4"),
        ({"experts": bytes(4 * 4)}, "4 positions have experts, of 3"),
        ({"chosen": 1}, "not of the model's layers"),
        ({"experts": bytes(5)}, "not rows"),
        ({"experts": bytes([4] * 4)}, "not rows of the model's experts"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, told: dict[str, Any], words: str) -> None:
    (problem,) = problems(tmp_path, **told)
    assert words in problem
