"""ATIF documents: each turn once with its recorded ids, calls and sub-agents where they belong, valid for Harbor."""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings as hypothesis_settings

from gyre.errors import UserError
from gyre.ledger import events as ev
from gyre.ledger.turns import Span, Turn
from gyre.views import atif
from gyre.views.atif_export import Documents, export_executions
from tests.proxy.conftest import ROOT, THINKING, model_folder, small_tokenizer
from tests.proxy.fake_harness import call
from tests.trajectory.trees import attempts
from tests.views.ledgers import Ledger

NAME = "g00000-00"
HARBOR = ROOT / ".venv" / "harbor"
"""Where `make test-slow` puts Harbor's package; its trajectory models need pydantic alone."""


def every(document: atif.Trajectory) -> Iterator[atif.Trajectory]:
    yield document
    for inner in document.subagent_trajectories or []:
        yield from every(inner)


def check(document: atif.Trajectory) -> None:
    """What the specification asks of a document, beyond the shapes that decoding checks."""
    inner = [sub.trajectory_id for sub in document.subagent_trajectories or []]
    assert len(set(inner)) == len(inner)
    assert [step.step_id for step in document.steps] == list(range(1, len(document.steps) + 1))
    assert document.steps
    for step in document.steps:
        calls = [call.tool_call_id for call in step.tool_calls or []]
        assert len(set(calls)) == len(calls)
        if step.source != "agent":
            assert (step.reasoning_content, step.tool_calls, step.metrics) == (None, None, None)
        if step.metrics is not None:
            assert len(step.metrics.logprobs) == len(step.metrics.completion_token_ids)
            assert not step.is_copied_context
        for result in step.observation.results if step.observation is not None else []:
            assert result.source_call_id is None or result.source_call_id in calls
            for reference in result.subagent_trajectory_ref or []:
                assert reference.trajectory_id in inner


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"), "{%- set opening = '' -%}" + THINKING.read_text())


def packed(ledger: Ledger, turns: list[Turn]) -> Ledger:
    ledger.dispatch([ev.GroupPlan("g00000", "task", 2)])
    ledger.record(turns)
    ledger.say("worker-0", ev.Finished(execution=NAME, attempt=1, outcome="graded", reason="finished", reward=1.0))
    ledger.say("worker-0", ev.Finished(execution="g00000-01", attempt=1, outcome="graded", reward=0.0))
    ledger.pack(["g00000"])
    return ledger


@given(turns=attempts(NAME, 1))
@hypothesis_settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
def test_every_turn_is_one_step_that_is_not_copied(model: Path, turns: list[Turn]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ledger = packed(Ledger(Path(folder), model=str(model)), turns)
        documents = Documents(ledger.opened(), prompt_ids=True).of_execution(NAME)
    whole: dict[int, list[int]] = {-1: []}
    for turn in turns:
        whole[turn.turn] = whole[turn.parent][: turn.keep] + turn.context + turn.output
    seen: Counter[int] = Counter()
    for document in documents.values():
        for each in every(msgspec.json.decode(msgspec.json.encode(document), type=atif.Trajectory)):
            check(each)
            for step in each.steps:
                if step.metrics is not None and step.extra is not None:
                    (turn,) = [turn for turn in turns if turn.turn == step.extra["turn"]]
                    seen[turn.turn] += 1
                    assert step.metrics.completion_token_ids == turn.output
                    assert (step.metrics.prompt_token_ids or []) + turn.output == whole[turn.turn]
    assert dict(seen) == {turn.turn: 1 for turn in turns if turn.context or turn.output}
    files = list(documents)
    assert [document.continued_trajectory_ref for document in documents.values()] == [*files[1:], None][: len(files)]


def conversation() -> list[Turn]:
    """Two calls at once, a sub-agent, a summary, and what follows it."""
    encode = small_tokenizer().encode
    turns: list[Turn] = []

    def add(context: str, output: str, after: int = -1, **more: Any) -> None:
        ids = encode(output).ids
        keep = 0
        at = after
        if after >= 0:
            keep = turns[at].keep + len(turns[at].context) + len(turns[at].output)
        turns.append(
            Turn(
                execution=NAME, attempt=1, turn=len(turns), parent=after, keep=keep, context=encode(context).ids,
                output=ids, logprobs=[-0.5] * len(ids), spans=[Span(1, 2, len(ids))], finished=3.5, **more,
            )
        )  # fmt: skip

    go, end = "<|im_start|>assistant\n", "<|im_end|>"
    add(f"<|im_start|>system\nBe brief.{end}\n<|im_start|>user\nFix it.{end}\n{go}",
        f"<think>\nhm\n</think>\n\nOn it.\n{call('bash')}\n{call('Agent', prompt='Find the bug.')}{end}")  # fmt: skip
    add(f"<|im_start|>system\nYou search.{end}\n<|im_start|>user\nFind the bug.{end}\n{go}", f"In a.py.{end}",
        thread="agent-7", role="sub-agent")  # fmt: skip
    results = "".join(f"<tool_response>\n{text}\n</tool_response>" for text in ("a b", "In a.py."))
    add(f"\n<|im_start|>user\n{results}{end}\n{go}", f"{call('bash')}{end}", 0)
    summary = "\n<|im_start|>user\n<tool_response>\nok\n</tool_response>Summarise." + f"{end}\n{go}"
    add(summary, f"It was in a.py.{end}", 2, role="main-summary")
    add(f"<|im_start|>user\nSo far: it was in a.py.{end}\n{go}", f"Done.{end}")
    return turns


def test_a_conversation_with_a_sub_agent_and_a_summary(model: Path, tmp_path: Path) -> None:
    ledger = packed(Ledger(tmp_path, model=str(model), tokens_per_microstep=4000), conversation())
    assert export_executions(ledger.opened(), tmp_path / "out") == (2, 1)
    first, second = (
        msgspec.json.decode((tmp_path / "out" / name).read_bytes(), type=atif.Trajectory)
        for name in (f"{NAME}.1.json", f"{NAME}.1.cont-1.json")
    )
    assert first.continued_trajectory_ref == f"{NAME}.1.cont-1.json"
    assert [(step.source, step.message) for step in first.steps] == [
        ("system", "Be brief."),
        ("user", "Fix it."),
        ("agent", "On it."),
        ("agent", ""),
        ("user", "Summarise."),
        ("agent", "It was in a.py."),
    ]
    opening = first.steps[2]
    assert opening.reasoning_content == "hm"
    assert opening.tool_calls is not None and opening.observation is not None
    assert [call.function_name for call in opening.tool_calls] == ["bash", "Agent"]
    plain, other, agent = opening.observation.results
    # Which of the two results is whose is not in the tokens; which call made the agent is.
    assert [(r.source_call_id, r.content) for r in (plain, other)] == [(None, "a b"), (None, "In a.py.")]
    (found,) = first.subagent_trajectories or []
    assert agent.source_call_id == opening.tool_calls[1].tool_call_id
    assert [ref.trajectory_id for ref in agent.subagent_trajectory_ref or []] == [found.trajectory_id]
    assert [step.message for step in found.steps] == ["You search.", "Find the bug.", "In a.py."]
    single = first.steps[3].observation
    assert single is not None and single.results[0].source_call_id == "call_2_0"
    assert [step.message for step in second.steps] == ["So far: it was in a.py.", "Done."]
    metrics = second.steps[1].metrics
    assert metrics is not None and metrics.extra["versions"] == [[1, 2, metrics.completion_tokens]]
    assert second.steps[1].timestamp == "1970-01-01T00:00:03.500000+00:00"
    assert first.extra["gyre"]["reward"] == 1.0
    assert first.final_metrics.total_steps == 6
    with pytest.raises(UserError, match="exists already"):
        export_executions(ledger.opened(), tmp_path / "out")
    with pytest.raises(UserError, match="no execution 'g9'"):
        export_executions(ledger.opened(), tmp_path / "other", "g9")


@pytest.mark.slow
def test_harbors_own_models_accept_the_documents(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    if not HARBOR.is_dir():
        pytest.skip(f"Harbor is not in {HARBOR}: make test-slow installs it")
    monkeypatch.setattr(sys, "path", [*sys.path, str(HARBOR)])
    from harbor.models.trajectories import Trajectory

    ledger = packed(Ledger(tmp_path, model=str(model), tokens_per_microstep=4000), conversation())
    export_executions(ledger.opened(), tmp_path / "out", prompt_ids=True)
    for path in (tmp_path / "out").iterdir():
        read = Trajectory.model_validate_json(path.read_bytes())
        assert read.schema_version == "ATIF-v1.8"
        ours = msgspec.json.decode(path.read_bytes())
        assert read.to_json_dict() == ours
