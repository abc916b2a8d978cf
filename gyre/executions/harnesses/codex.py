"""Codex CLI: how it is started headless (measured on 0.171.0; it speaks Responses only)."""

from __future__ import annotations

import json
from pathlib import Path

from gyre.executions.harnesses import LaunchRequest
from gyre.executions.harnesses.install import INSIDE
from gyre.executions.harnesses.packaged import Packaged, found_inside
from gyre.executions.transcripts import Told, files_in, json_lines

_HOUR = 3_600_000
_KEY = "GYRE_API_KEY"
_COMPACT_AT = 0.8
"""Share of the context at which it compacts: it does not when a prompt is refused."""


class CodexHarness(Packaged):
    """See `Harness`."""

    name = "codex"
    dialect = "openai-responses"

    def argv(self, request: LaunchRequest, folder: Path) -> tuple[str, ...]:
        binary = found_inside(folder, "node_modules/@openai/codex-linux-*/vendor/*/bin/codex", INSIDE)
        provider = {
            "name": "gyre",
            "base_url": f"http://127.0.0.1:{request.port}/v1",
            "env_key": _KEY,
            "wire_api": "responses",
            "stream_idle_timeout_ms": _HOUR,
        }
        # JSON's numbers and text are TOML's too.
        settings = {f"model_providers.gyre.{name}": json.dumps(value) for name, value in provider.items()}
        settings |= {"model_provider": '"gyre"', "model": json.dumps(request.model), "web_search": '"disabled"'}
        if request.context:
            settings["model_context_window"] = str(request.context)
            settings["model_auto_compact_token_limit"] = str(int(request.context * _COMPACT_AT))
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        free = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
        return (binary, "exec", "--json", *options, *free, request.task.instruction)

    def environment(self, request: LaunchRequest) -> dict[str, str]:
        return {_KEY: request.key}

    def transcript(self, snapshot: Path, log: Path) -> Told | None:
        """Its rollouts, one a thread: a usage record a call, and a running total of tokens."""
        rollouts = files_in(snapshot, "root/.codex/sessions/*/*/*/rollout-*.jsonl")
        calls = tokens = 0
        for rollout in rollouts:
            total = 0
            for line in json_lines(rollout):
                calls += line.get("type") == "token_usage_record"
                payload = line.get("payload") or {}
                if payload.get("type") == "token_count" and payload.get("info"):
                    total = int(payload["info"]["total_token_usage"]["output_tokens"])
            tokens += total
        return Told(calls=calls, tokens=tokens) if rollouts else None
