"""`gyre verify`: a finished run is sound, and each kind of damage is named, first and by the right rule."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gyre.cli.export_ import export
from gyre.errors import UserError
from gyre.launch.evaluate import find_subject
from gyre.ledger import events as ev
from gyre.ledger.checkpoints import chosen
from gyre.ledger.layout import RunFolder
from gyre.ledger.microstep_files import read_microstep
from gyre.views.audit import audit
from gyre.views.runs import read_run
from tests.views.finished import CORE, SATELLITE, Finished, rewrite_journal, rewrite_turns, said, write_checkpoint
from tests.views.ledgers import WORKER

WRITERS = ["scheduler", "processor", WORKER, CORE, SATELLITE]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    ledger = Finished(tmp_path_factory.mktemp("finished"))
    ledger.make()
    return ledger.run.path


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> RunFolder:
    return RunFolder(Path(shutil.copytree(whole, tmp_path / "x")))


def first(run: RunFolder) -> tuple[str, str]:
    """(rule, breach) of the first thing that is wrong; ("", "") when nothing is."""
    return next(((rule.rule, rule.breaches[0]) for rule in audit(read_run(run)) if rule.breaches), ("", ""))


def test_a_whole_run_breaks_no_rule_and_each_rule_looks_at_something(run: RunFolder) -> None:
    rules = audit(read_run(run))
    assert [rule.breaches for rule in rules] == [[]] * len(rules)
    assert {rule.rule: rule.cases for rule in rules if not rule.cases} == {}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("seed", range(3))
def test_a_changed_byte_in_a_journal(run: RunFolder, writer: str, seed: int) -> None:
    path, rng = run.journal_path(writer, 1), random.Random(seed)
    data = bytearray(path.read_bytes())
    place = rng.choice([i for i, byte in enumerate(data) if byte != 10])
    data[place] ^= 1 + rng.randrange(2)
    path.write_bytes(data)
    rule, breach = first(run)
    line = bytes(data[:place]).count(b"\n") + 1
    assert rule == "journals are whole" and f"{path.name} line {line} " in breach


@pytest.mark.parametrize("writer", WRITERS)
def test_a_missing_journal(run: RunFolder, writer: str) -> None:
    run.index_path(writer).unlink()
    with pytest.raises(UserError, match=writer):
        read_run(run)


@pytest.mark.parametrize(
    ("writer", "kept", "rule", "word"),
    [
        (WORKER, -1, "a run that ended as finished has done everything", "g00001-01 is open"),
        ("processor", 2, "what one process says of another's work is there", "never announced"),
        (SATELLITE, -1, "what one process says of another's work is there", "never offered"),
        (CORE, -1, "a run that ended as finished has done everything", "step 0 is the last"),
    ],
)
def test_a_journal_that_lost_its_last_lines(run: RunFolder, writer: str, kept: int, rule: str, word: str) -> None:
    rewrite_journal(run, writer, said(run, writer)[:kept])
    found, breach = first(run)
    assert found == rule and word in breach


def test_a_journal_shorter_than_what_the_scheduler_has_read(run: RunFolder) -> None:
    accepted = ev.Accepted(writer=WORKER, incarnation=2, cut={1: 40})
    rewrite_journal(run, "scheduler", [*said(run, "scheduler"), accepted])
    assert first(run) == (
        "journals are whole",
        f"{run.journal_path(WORKER, 1)} ends after 9 lines, and the scheduler has read 41",
    )


def _shard(run: RunFolder) -> Path:
    (path,) = run.shard_dir(WORKER).glob("*.arrow")
    return path


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("damage", [_cut, Path.unlink])
def test_a_damaged_or_missing_shard(run: RunFolder, damage: Callable[[Path], None]) -> None:
    damage(_shard(run))
    rule, breach = first(run)
    assert rule == "shards are whole, and a finished execution has all its turns"
    assert _shard_name(run) in breach or "0 turns in shards, 1 journalled" in breach


def _shard_name(run: RunFolder) -> str:
    return str(run.shard_dir(WORKER))


@pytest.mark.parametrize("change", [{"output": [7] * 30}, {"logprobs": [-2.0] * 30}, {"status": "undelivered"}])
def test_a_shard_with_another_content(run: RunFolder, change: dict[str, Any]) -> None:
    rewrite_turns(run, change)
    rule, breach = first(run)
    assert rule == "micro-steps follow from the shards" and "step-000001" in breach


@pytest.mark.parametrize("number", range(4))
def test_a_damaged_microstep(run: RunFolder, number: int) -> None:
    """Any byte: either the file still gives the same content (padding), or it is named."""
    name = f"step-000001/1-{number:05d}"
    path, rng = run.microsteps / f"{name}.arrow", random.Random(number)
    data = path.read_bytes()
    named = 0
    for _ in range(12):
        changed = bytearray(data)
        changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        rule, breach = first(run)
        if not breach:
            path_digest = read_microstep(path)[1]
            path.write_bytes(data)
            assert read_microstep(path)[1] == path_digest
            continue
        named += 1
        assert rule == "micro-step files are whole and are what was announced" and name in breach
    assert named


def test_a_missing_microstep_and_one_in_anothers_place(run: RunFolder) -> None:
    names = [run.microsteps / f"step-000001/1-{number:05d}.arrow" for number in range(2)]
    shutil.copyfile(names[0], names[1])
    rule, breach = first(run)
    assert rule == "micro-step files are whole and are what was announced"
    assert "step-000001/1-00001: digest" in breach
    names[1].unlink()
    assert f"{names[1]} does not exist" in first(run)[1]


def _merged(run: RunFolder) -> tuple[list[Any], int]:
    events = said(run, CORE)
    (place,) = [i for i, event in enumerate(events) if isinstance(event, ev.Merged)]
    return events, place


def test_a_contribution_merged_twice_or_not_at_all(run: RunFolder) -> None:
    rule = "a step is committed from exactly its packed micro-steps, each merged once"
    events, place = _merged(run)
    rewrite_journal(run, CORE, [*events[: place + 1], *events[place:]])
    assert first(run) == (rule, "step 1: step-000001/1-00002 is merged 2 times")
    rewrite_journal(run, CORE, [*events[:place], *events[place + 1 :]])
    assert first(run) == (rule, "step 1: merged is not packed")


def test_a_target_of_two_microsteps(run: RunFolder) -> None:
    """Said of the files, whatever was packed: here one file is announced, and packed, under two names."""
    step = run.microsteps / "step-000001"
    shutil.copyfile(step / "1-00000.arrow", step / "1-00004.arrow")
    events = said(run, "processor")
    again = next(event for event in events if isinstance(event, ev.MicroStepReady))
    twin = ev.MicroStepReady(**{**_fields(again), "microstep": "step-000001/1-00004"})
    packed = ev.Packed(**{**_fields(events[-1]), "microsteps": [*events[-1].microsteps, twin.microstep]})
    rewrite_journal(run, "processor", [*events[:-1], twin, packed])
    breaches = {rule.rule: rule.breaches for rule in audit(read_run(run)) if rule.breaches}
    assert "the shards give 4 micro-steps, not 5" in breaches["micro-steps follow from the shards"][0]
    twice = breaches["no sampled token is a target twice"]
    assert len(twice) == 30 and "step-000001/1-00004: ('g00000-00', 1, 0, 0) is a target twice" in twice


def _fields(event: Any) -> dict[str, Any]:
    return {name: getattr(event, name) for name in event.__struct_fields__}


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda path: (path / "weight/c.0.0").write_bytes(bytes(24)), "weight/c.0.0 has changed"),
        (lambda path: (path / "weight/c.1.0").unlink(), "weight/c.1.0 is missing"),
        (lambda path: (path / "weight/c.1.0").write_bytes(b"x"), "weight/c.1.0 has 1 bytes instead of 24"),
        (lambda path: (path / "weight/zarr.json").write_text("{}"), "weight/zarr.json has"),
        (lambda path: (path / "COMPLETE").unlink(), "no COMPLETE file"),
        (lambda path: (path / "COMPLETE").write_text("{}"), "COMPLETE is damaged"),
        (shutil.rmtree, "step-000001.zarr is missing"),
        (lambda path: path.rename(path.with_name("step-000002.zarr")), "its COMPLETE file is of step 1"),
    ],
)
def test_a_damaged_checkpoint(run: RunFolder, damage: Callable[[Path], object], word: str) -> None:
    damage(run.checkpoint_path(1))
    rule, breach = first(run)
    assert rule == "checkpoints are whole, and of the steps that stand" and word in breach


def test_a_checkpoint_that_a_lineage_left_after_its_end_counts_for_nobody(run: RunFolder, tmp_path: Path) -> None:
    opened = ev.LineageOpened(lineage=2, step=1, version=1, weight_version="w1", manifest="m1")
    core = said(run, CORE)
    rewrite_journal(run, CORE, [*core, opened])
    left = write_checkpoint(run, 1, 2, ["x"], "z")
    assert first(run) == ("", "")
    info, (line,) = chosen(run.checkpoints, 0, read_run(run).state.openings())
    assert info is not None and info.path == run.checkpoint_path(1) and str(left) in line
    with pytest.raises(UserError, match="of lineage 1, which ended before this step counted"):
        export(to=tmp_path / "out", run=str(run.path), step=2)
    with pytest.raises(UserError, match="of lineage 1, which ended before this step counted"):
        find_subject(str(run.path), None, 2, lambda _: None)

    again = [msgspec.structs.replace(core[-1], lineage=2), msgspec.structs.replace(opened, step=0)]
    rewrite_journal(run, CORE, [*core, *reversed(again)])
    breaches = {rule.rule: rule.breaches for rule in audit(read_run(run))}
    (breach,) = breaches["checkpoints are whole, and of the steps that stand"]
    assert "of a lineage that had ended; that of the step that stands is missing" in breach


def test_a_checkpoint_of_another_lineage_or_of_other_microsteps(run: RunFolder) -> None:
    names = [f"step-000001/1-{number:05d}" for number in range(4)]
    write_checkpoint(run, 1, 1, names[:3], "o")
    assert "made from 3 micro-steps that are not the packed ones" in first(run)[1]
    write_checkpoint(run, 7, 1, names, "p")
    assert "of lineage 7, and the step that stands is of lineage 1" in first(run)[1]
    shutil.rmtree(run.checkpoint_path(1))
    write_checkpoint(run, 1, 1, names, "q")
    assert first(run) == ("", "")
