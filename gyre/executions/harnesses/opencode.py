"""OpenCode: how it is started headless (measured on 1.18; its first start takes up to 30 s)."""

from __future__ import annotations

import json
import platform
from pathlib import Path

from gyre.executions.harnesses import LaunchRequest
from gyre.executions.harnesses.install import INSIDE
from gyre.executions.harnesses.packaged import Packaged, found_inside
from gyre.executions.transcripts import Told, json_lines

_KEY = "GYRE_API_KEY"
_SMALL = "-small"
"""Side calls ask for another name of the same model: so they can be told apart."""
_CONTEXT, _OUTPUT = 1_000_000, 32_000
_MACHINES = {"x86_64": "x64", "aarch64": "arm64"}


class OpenCodeHarness(Packaged):
    """See `Harness`."""

    name = "opencode"
    dialect = "openai-chat"

    def argv(self, request: LaunchRequest, folder: Path) -> tuple[str, ...]:
        machine = _MACHINES.get(platform.machine(), platform.machine())
        binary = found_inside(folder, f"node_modules/opencode-linux-{machine}/bin/opencode", INSIDE)
        return (binary, "run", "--model", f"gyre/{request.model}", "--format", "json", request.task.instruction)

    def environment(self, request: LaunchRequest) -> dict[str, str]:
        options = {"baseURL": f"http://127.0.0.1:{request.port}/v1", "apiKey": f"{{env:{_KEY}}}", "timeout": False}
        limit = {"limit": {"context": request.context or _CONTEXT, "output": request.max_tokens or _OUTPUT}}
        models = {request.model: limit, request.model + _SMALL: limit}
        provider = {"npm": "@ai-sdk/openai-compatible", "name": "gyre", "options": options, "models": models}
        config = {
            "provider": {"gyre": provider},
            "small_model": f"gyre/{request.model}{_SMALL}",
            "permission": {"edit": "allow", "bash": "allow", "webfetch": "deny"},
            "autoupdate": False,
            "share": "disabled",
        }
        return {
            _KEY: request.key,
            "OPENCODE_CONFIG_CONTENT": json.dumps(config),
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
        }

    def transcript(self, snapshot: Path, log: Path) -> Told | None:
        """Its output: the main session's steps, summaries among them, without sub-agents and titles."""
        tokens = [
            int(line["part"]["tokens"]["output"]) for line in json_lines(log) if line.get("type") == "step_finish"
        ]
        roles = ("main", "main-summary")
        return Told(calls=len(tokens), tokens=sum(tokens), call_roles=roles, token_roles=roles) if tokens else None
