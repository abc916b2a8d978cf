"""Qwen Code: how it is started headless (measured on 0.15 and 0.24, which needs Node 22 or newer)."""

from __future__ import annotations

import json
from pathlib import Path

from gyre.executions.harnesses import LaunchRequest
from gyre.executions.harnesses.install import INSIDE
from gyre.executions.harnesses.packaged import Packaged, found_inside

NODE = "/usr/bin/node"
"""The sandbox's, for versions that were installed without one of their own."""
_HOUR = "3600000"
_SETTINGS = {
    "telemetry": {"enabled": False},
    "privacy": {"usageStatisticsEnabled": False},
    "general": {"disableAutoUpdate": True, "enableAutoUpdate": False},
    # Its own notes on the user would be side calls in every execution.
    "memory": {"enableManagedAutoMemory": False, "enableManagedAutoDream": False},
}


class QwenCodeHarness(Packaged):
    """See `Harness`."""

    name = "qwen-code"
    dialect = "openai-chat"

    def argv(self, request: LaunchRequest, folder: Path) -> tuple[str, ...]:
        entry = found_inside(folder, "node_modules/@qwen-code/qwen-code/cli.js", INSIDE)
        turns = ("--max-session-turns", str(request.max_turns))
        own = next(iter(folder.glob("node_modules/node-linux-*/bin/node")), None)
        node = f"{INSIDE}/{own.relative_to(folder)}" if own is not None else NODE
        return (node, entry, "--yolo", "--auth-type", "openai", *turns, "-p", request.task.instruction)

    def environment(self, request: LaunchRequest) -> dict[str, str]:
        return {
            "OPENAI_BASE_URL": f"http://127.0.0.1:{request.port}/v1",
            "OPENAI_API_KEY": request.key,
            "OPENAI_MODEL": request.model,
            "QWEN_CODE_API_TIMEOUT_MS": _HOUR,
            "QWEN_STREAM_IDLE_TIMEOUT_MS": _HOUR,
        }

    def files(self, request: LaunchRequest) -> dict[str, str]:
        window = {"model": {"generationConfig": {"contextWindowSize": request.context}}} if request.context else {}
        return {"/etc/qwen-code/settings.json": json.dumps({**_SETTINGS, **window})}
