"""Emulated runs: real processes with paced engines and trainers, in all three modes. Nothing is timed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gyre.ledger import events as ev
from gyre.ledger.job import read_job
from gyre.ledger.layout import RunFolder
from gyre.ledger.tail import JournalTail, Line
from gyre.simulate.paced.emulate import Emulation, emulate, name_of
from gyre.simulate.paced.pace import CLAIMS, ENDING, FILLER, OPENING, Pace, Script
from gyre.views.audit import audit
from gyre.views.runs import read_run
from tests.simulate.tiny import tiny

BUILD = Path(__file__).resolve().parents[2] / "recipes" / "tiny_model" / "build.py"
SETTINGS = (
    "steps=2",
    "group.executions=2",
    "group.groups_per_step=2",
    "schedule.steps_per_burst=1",
    "schedule.max_overtake=0",
    "cells.count=2",
    "cells.executions_per_cell=4",
    "cells.to_training=0.4",
    "cells.to_rollout=0.3",
    "cells.refresh=0.1",
    "executions.mean=2",
    "executions.timeout=60",
    "training.work=0.5",
    "training.microstep=1",
    "training.optimizer=0.3",
)


def pace(**changes: object) -> Pace:
    usual = {
        "to_training": 1.0,
        "to_rollout": 1.0,
        "refresh": 1.0,
        "optimizer": 1.0,
        "merge": 0.0,
        "token": 0.01,
        "turns": 3,
        "generation": 0.5,
        "fillers": 10,
        "jobs": {"t": [60.0, 30.0]},
    }
    return Pace(**{**usual, **changes})  # type: ignore[arg-type]


@dataclass
class Stage:
    script: Script
    tokenizer: Tokenizer

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text).ids)

    def text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    """A script over single bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([ENDING])
    pace().write(tmp_path)
    return Stage(Script(tmp_path, Pace.read(tmp_path), tokenizer), tokenizer)


def test_a_call_that_was_cut_is_continued_by_whoever_reads_its_prompt(stage: Stage) -> None:
    asked = stage.ids(f"Pace t.{OPENING}\n")
    whole = stage.script.answer(asked)
    assert whole.seconds == pytest.approx(60.0 * 0.5 / 3)
    cut = whole.after(0.45)
    rest = stage.script.answer([*asked, *cut])
    assert rest.head == []
    assert rest.seconds == pytest.approx(whole.seconds * 0.6)
    assert cut + rest.after(1.0) == whole.after(1.0)


def test_turns_follow_each_other_and_the_last_one_calls_no_tool(stage: Stage) -> None:
    prompt = stage.ids(f"Pace t.{OPENING}\n")
    said = []
    for _ in range(3):
        said.append(stage.text(stage.script.answer(prompt).after(1.0)))
        prompt = [*prompt, *stage.ids(f"{said[-1]}\n{OPENING}\n")]
    assert [text.split()[:5] for text in said] == [["job", "t", "0", "turn", f"{n}/3"] for n in (1, 2, 3)]
    assert ["sleep 15.000" in text for text in said] == [True, True, False]
    assert all(text.count(FILLER) == 10 for text in said)


def test_each_job_is_claimed_once(stage: Stage) -> None:
    asked = stage.ids(f"Pace t.{OPENING}\n")
    assert [stage.script.answer(asked).seconds for _ in range(2)] == [pytest.approx(10.0), pytest.approx(5.0)]
    with pytest.raises(ValueError, match="without a paced task"):
        stage.script.answer(stage.ids("hello"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[dict[str, RunFolder]]:
    folder = tmp_path_factory.mktemp("emulated")
    emulation = Emulation(tiny(*SETTINGS), 1.0, {"build": str(BUILD), "build_arguments": ["--steps", "0"]})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GYRE_RUNS", str(folder / "runs"))
        patch.setenv("GYRE_CACHE", str(cache))
        made = {}
        for mode in ("elastic", "colocate", "async"):
            made[mode] = emulation.prepare(folder, mode)
            asyncio.run(emulate(made[mode]))
        yield made


def lines(run: RunFolder) -> list[Line]:
    return JournalTail(run, read_job(run).writers()).poll()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_modes_end_with_a_sound_ledger_and_the_same_consumption(runs: dict[str, RunFolder]) -> None:
    consumed = {}
    for mode, run in runs.items():
        assert read_run(run).state.ended == ev.RunEnded(state="finished")
        assert [rule for rule in audit(read_run(run)) if rule.breaches] == []
        consumed[mode] = [line.event for line in lines(run) if isinstance(line.event, ev.Consumed)]
        assert len(list((run.path / CLAIMS).iterdir())) == 8
    assert consumed["elastic"] == consumed["colocate"] == consumed["async"]
    assert len(consumed["elastic"]) == 4


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_modes_differ_in_who_trains_and_when(runs: dict[str, RunFolder]) -> None:
    trained = {
        mode: {line.event.cell for line in lines(run) if isinstance(line.event, ev.TrainOrdered)}
        for mode, run in runs.items()
    }
    assert trained["async"] == {"cell-0"}
    assert "cell-0" in trained["elastic"] and "cell-0" in trained["colocate"]
    served = {line.writer for line in lines(runs["async"]) if isinstance(line.event, ev.Serving)}
    assert served == {"cell-1"}
    assert {name_of(n) for n in range(4)} == set(read_job(runs["async"]).tasks)
