"""What `gyre show` prints: the tree of an execution, and a turn's text with its trained tokens marked."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre.errors import UserError
from gyre.ledger import events as ev
from gyre.ledger.turns import Span, Turn
from gyre.views.show import find_execution
from gyre.views.show_text import numbers_text, tree_text, turn_text
from tests.proxy.conftest import TINY, model_folder, small_tokenizer
from tests.views.ledgers import Ledger

NAME = "g00000-00"


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """Two executions of one group. The first has a sub-agent, a side call, and a reply that was lost."""
    encode = small_tokenizer().encode

    def turn(number: int, context: str, output: str, parent: int = -1, keep: int = 0, **more: object) -> Turn:
        ids = encode(output).ids
        return Turn(
            execution=NAME, attempt=1, turn=number, parent=parent, keep=keep, context=encode(context).ids, output=ids,
            logprobs=[-0.5] * len(ids), spans=[Span(1, 0, 1), Span(1, 1, len(ids) - 1)], cell="cell-0", **more,
        )  # fmt: skip

    first = turn(0, "<|im_start|>user\nhello", "the files are here<|im_end|>")
    length = len(first.context) + len(first.output)
    turns = [
        first,
        turn(1, "look", "name", thread="agent-7", role="sub-agent", evidence='{"role": "agent-id 7"}'),
        turn(2, "\nand", "cat a.txt<|im_end|>", parent=0, keep=length),
        turn(3, "\nand", "ls -la", parent=0, keep=length, status="undelivered"),
        turn(4, "title", "ls", thread="main/title", role="auxiliary"),
    ]
    made = Ledger(tmp_path, model=str(model_folder(tmp_path / "model", TINY.read_text())))
    made.dispatch([ev.GroupPlan("g00000", "task", 2)])
    made.record(turns)
    steps = [
        ev.StepEnd(name="one", outcome="graded", reason="harness_timeout", reward=0.5, model_calls=4, seconds=2.0),
        ev.StepEnd(name="two", outcome="excluded", reason="grader_failed", model_calls=1, seconds=1.0),
    ]
    counts = {"turns": 5, "tokens_sampled": sum(len(t.output) for t in turns), "steps": steps}
    made.say(
        "worker-0", ev.Finished(execution=NAME, attempt=1, outcome="graded", reason="finished", reward=1.0, **counts)
    )
    made.say("worker-0", ev.Finished(execution="g00000-01", attempt=1, outcome="graded", reward=0.0))
    made.pack(["g00000"])
    return made


def test_the_tree_of_an_execution(ledger: Ledger) -> None:
    view = find_execution(ledger.opened(), NAME)
    text = tree_text(view)
    lines = [line.split() for line in text.splitlines()]
    sizes = {t.turn: str(t.output_tokens) for t in view.turns}
    main = text.index("thread main\n")
    assert main < text.index("thread agent-7") < text.index("thread main/title")
    assert ["0", "-", str(view.turns[0].context_tokens), sizes[0], sizes[0], "main", "1.0", "1.1", "cell-0"] in lines
    assert "sub-agent          1.0 1.1  cell-0  (agent-id 7)" in text
    (lost,) = [line for line in lines if line[:2] == ["3", "0"]]
    assert lost[4:] == ["0", "main", "1.0", "1.1", "cell-0", "undelivered"]
    (title,) = [line for line in lines if line[:1] == ["4"]]
    assert title[4:] == ["0", "auxiliary", "1.0", "1.1", "cell-0", "auxiliary"]
    trained = sum(int(sizes[n]) for n in (0, 1, 2))
    assert f"{trained + int(sizes[3]) + int(sizes[4])} tokens sampled = {trained} trained" in text
    assert f"1: step 1, turns 0, 2: {int(sizes[0]) + int(sizes[2])} targets, advantage +1.000" in text
    assert f"2: step 1, turns 1: {sizes[1]} targets" in text
    assert "step one: reward 0.50  harness_timeout  4 calls  2.0 s\nstep two: reward -  grader_failed  1 calls" in text


def test_a_turns_text_with_trained_tokens_marked(ledger: Ledger) -> None:
    shown = turn_text(find_execution(ledger.opened(), NAME, 2)).splitlines()
    count = len(small_tokenizer().encode("cat a.txt<|im_end|>").ids)
    assert shown[-2:] == [f">>> trained in step 1, path 1 [0:{count}]", "cat a.txt<|im_end|>"]
    lost = turn_text(find_execution(ledger.opened(), NAME, 3))
    assert "not trained: undelivered" in lost
    assert lost.endswith("ls -la")


def test_unknown_executions_and_turns_are_named(ledger: Ledger) -> None:
    with pytest.raises(UserError, match="no execution 'g9'; the first is g00000-00"):
        find_execution(ledger.opened(), "g9")
    with pytest.raises(UserError, match="g00000-00 has no turn 9"):
        find_execution(ledger.opened(), NAME, 9)


def test_numbers_as_runs() -> None:
    assert numbers_text([0, 1, 2, 4, 6, 7]) == "0-2, 4, 6-7"
    assert numbers_text([]) == ""
