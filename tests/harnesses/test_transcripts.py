"""Counting what a harness wrote of its session: each format, and files that an agent may have tampered with."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from gyre.executions.harnesses import find_harness
from gyre.executions.transcripts import Told, files_in, json_lines, text_of, told_by
from gyre.ledger import events as ev
from gyre.processes.worker import transcript_count
from gyre.proxy.capture import Stats


def lines(path: Path, *values: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def usage(total: int) -> dict[str, Any]:
    info = {"total_token_usage": {"output_tokens": total}}
    return {"type": "event_msg", "payload": {"type": "token_count", "info": info}}


def test_codex_has_a_rollout_a_thread(tmp_path: Path) -> None:
    folder = tmp_path / "root/.codex/sessions/2026/01/02"
    record = {"type": "token_usage_record", "payload": None}
    nothing = {"type": "event_msg", "payload": {"type": "token_count", "info": None}}
    lines(folder / "rollout-a.jsonl", nothing, record, usage(30), record, usage(70))
    lines(folder / "rollout-b.jsonl", record, usage(5))
    assert told_by(find_harness("codex"), tmp_path, tmp_path / "log") == Told(calls=3, tokens=75)
    assert told_by(find_harness("codex"), tmp_path / "root/.codex/sessions", tmp_path / "log") is None


def test_opencode_prints_the_main_sessions_steps(tmp_path: Path) -> None:
    steps = [{"type": "step_finish", "part": {"tokens": {"output": n}}} for n in (4, 6)]
    log = lines(tmp_path / "log", {"type": "text"}, *steps)
    told = told_by(find_harness("opencode"), tmp_path, log)
    assert told is not None and (told.calls, told.tokens) == (2, 10)
    stats = Stats(roles={"main": (1, 4), "main-summary": (1, 6), "sub-agent": (3, 9), "auxiliary": (1, 1)})
    assert transcript_count(told, stats) == ev.TranscriptCount(calls=2, tokens=10, turns=2, sampled=10)


def test_claude_code_counts_messages_without_summaries_and_tokens_of_all_calls(tmp_path: Path) -> None:
    said = [{"type": "assistant", "message": {"id": name}} for name in ("msg_1", "msg_1", "msg_2", "made-up")]
    log = lines(tmp_path / "log", *said, {"type": "result", "modelUsage": {"m": {"outputTokens": 12}}})
    told = told_by(find_harness("claude-code"), tmp_path, log)
    assert told is not None and (told.calls, told.tokens) == (2, 12)
    stats = Stats(roles={"main": (2, 9), "main-summary": (1, 4)})
    count = transcript_count(told, stats)
    assert count == ev.TranscriptCount(calls=2, tokens=12, turns=2, sampled=13)
    assert count is not None and not count.equal
    # Its output was cut: no last line, no count.
    assert told_by(find_harness("claude-code"), tmp_path, lines(tmp_path / "cut", *said)) is None


def test_mini_swe_agent_keeps_dropped_replies_too(tmp_path: Path) -> None:
    response = {"usage": {"completion_tokens": 7}}
    messages = [
        {"role": "user"},
        {"role": "assistant", "extra": {"response": response}},
        {"extra": {"response": response}},
    ]
    whole = {"info": {"model_stats": {"api_calls": 2}}, "messages": messages}
    lines(tmp_path / "logs/agent/mini-swe-agent.traj.json", whole)
    assert told_by(find_harness("mini-swe-agent"), tmp_path, tmp_path / "log") == Told(calls=2, tokens=14)
    assert told_by(find_harness("shell"), tmp_path, tmp_path / "log") is None


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"messages": 1}', "{" * 100_000, '{"info": [], "messages": []}', "\0\0"]
)
def test_whatever_the_file_holds_is_no_failure(tmp_path: Path, text: str) -> None:
    path = tmp_path / "logs/agent/mini-swe-agent.traj.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert told_by(find_harness("mini-swe-agent"), tmp_path, tmp_path / "log") is None
    lines(tmp_path / "log", {"type": "assistant", "message": 5}, {"type": "result", "modelUsage": {}})
    assert told_by(find_harness("claude-code"), tmp_path, tmp_path / "log") is None


def test_links_and_pipes_are_not_followed(tmp_path: Path) -> None:
    secret = lines(tmp_path / "secret/rollout-a.jsonl", usage(1))
    snapshot = tmp_path / "snapshot"
    (snapshot / "in").mkdir(parents=True)
    (snapshot / "in/rollout-b.jsonl").symlink_to(secret)
    (snapshot / "out").symlink_to(secret.parent)
    assert files_in(snapshot, "*/rollout-*.jsonl") == []
    os.mkfifo(snapshot / "in/rollout-c.jsonl")
    with pytest.raises(OSError, match="not a regular file"):
        text_of(snapshot / "in/rollout-c.jsonl")
    with pytest.raises(OSError):
        list(json_lines(snapshot / "in/rollout-b.jsonl"))
