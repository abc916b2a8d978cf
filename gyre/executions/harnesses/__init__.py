"""Harnesses: how an agent program is started so that it talks to the proxy.

Owns the `Harness` interface and the registry: the built-in ones, and those that other packages offer under
the entry-point group `gyre.harnesses` (an object or a class without arguments). Invariant: a harness only
describes its launch; it starts nothing itself.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Protocol

from msgspec import Struct, field

from gyre.errors import UserError
from gyre.executions.sandbox import Bind
from gyre.executions.steps import parts
from gyre.executions.tasks import Task

GROUP = "gyre.harnesses"
BUILT_IN = {
    "shell": ("gyre.executions.harnesses.shell", "ShellHarness"),
    "claude-code": ("gyre.executions.harnesses.claude_code", "ClaudeCodeHarness"),
    "codex": ("gyre.executions.harnesses.codex", "CodexHarness"),
    "mini-swe-agent": ("gyre.executions.harnesses.mini_swe_agent", "MiniSweAgentHarness"),
    "opencode": ("gyre.executions.harnesses.opencode", "OpenCodeHarness"),
    "qwen-code": ("gyre.executions.harnesses.qwen_code", "QwenCodeHarness"),
}


class LaunchRequest(Struct, frozen=True, kw_only=True):
    """What a harness is told about its execution. `port` is the proxy's on the sandbox's own loopback."""

    task: Task
    port: int
    key: str
    model: str
    max_turns: int = 200
    max_tokens: int = 0
    """Most tokens of one reply; 0: the harness's own choice."""
    context: int = 0
    """Tokens that a call and its reply have room for; 0: not known, so the harness compacts when it is refused."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables from the recipe."""


class Launch(Struct, frozen=True, kw_only=True):
    """A command for the sandbox. `files` maps paths inside to text; they are bound in read-only."""

    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    binds: tuple[Bind, ...] = ()


class Harness(Protocol):
    name: str
    dialect: str
    """What it speaks to the proxy: openai-chat, openai-responses or anthropic."""

    def check(self, version: str) -> str:
        """The installed version.

        Raises UserError when it is missing, or is not the wanted `version` ("": any).
        """

    def prepare(self, request: LaunchRequest) -> Launch:
        """The launch for one execution."""


def refuse_instruction(harness: Harness, task: Task) -> None:
    """An instruction that is longer than `harness` can be started with, where it says so (`instruction_bytes`).

    Raises UserError: told before anything is submitted.
    """
    most = getattr(harness, "instruction_bytes", 0)
    for part in parts(task):
        if most and (size := len(part.task.instruction.encode())) > most:
            raise UserError(
                f"{task.folder}: {part.named('the instruction')} has {size} bytes, and {harness.name} is started with"
                f" {most} at most; shorten it, or put it into a file of the environment"
            )


def find_harness(name: str) -> Harness:
    """The harness of this name. Raises UserError listing the known ones."""
    if name in BUILT_IN:
        module, attribute = BUILT_IN[name]
        harness: Harness = getattr(importlib.import_module(module), attribute)()
        return harness
    offered = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in offered:
        raise UserError(f"harness.name = {name!r} is not known; known are {', '.join(sorted({*BUILT_IN, *offered}))}")
    loaded = offered[name].load()
    found: Harness = loaded() if isinstance(loaded, type) else loaded
    return found
