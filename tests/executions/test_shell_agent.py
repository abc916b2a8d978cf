"""The `shell` agent as a program, against a scripted server on the host's loopback."""

from __future__ import annotations

import ast
import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gyre.errors import UserError
from gyre.executions.harnesses import LaunchRequest, find_harness, shell_agent, shell_prompt

AGENT = Path(shell_agent.__file__)


async def run_agent(model: Any, folder: Path, **settings: str) -> tuple[int, str]:
    """Exit code and output of the agent with `folder` as its work directory."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    await model.serve(listener)
    (folder.parent / "instruction").write_text("Do it.")
    env = {
        "PATH": os.environ["PATH"],
        "OPENAI_BASE_URL": f"http://127.0.0.1:{port}/v1",
        "OPENAI_API_KEY": "key-1",
        "OPENAI_MODEL": "tiny",
        "SHELL_INSTRUCTION": str(folder.parent / "instruction"),
        **settings,
    }
    program = [sys.executable, "-I", "-S", str(AGENT)]
    process = await asyncio.create_subprocess_exec(
        *program, env=env, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    output, _ = await process.communicate()
    model.close()
    assert process.returncode is not None
    return process.returncode, output.decode()


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def contents(model: Any) -> list[str]:
    """The tool messages of the last request."""
    return [message["content"] for message in model.requests[-1]["messages"] if message["role"] == "tool"]


@pytest.mark.parametrize("stream", ["", "1"])
async def test_a_conversation(scripted: Any, work: Path, stream: str) -> None:
    model = scripted(["echo hello > out.txt", "cat out.txt; exit 3", None])
    code, output = await run_agent(model, work, SHELL_STREAM=stream, SHELL_MAX_TOKENS="64")
    assert (code, (work / "out.txt").read_text()) == (0, "hello\n")
    assert output == "$ echo hello > out.txt\nok\n$ cat out.txt; exit 3\nhello\n[exit code 3]\nIt is done.\n"
    first, _, last = model.requests
    assert first == {
        "model": "tiny",
        "messages": [{"role": "system", "content": shell_prompt.SYSTEM}, {"role": "user", "content": "Do it."}],
        "tools": [shell_prompt.TOOL],
        "max_tokens": 64,
        **({"stream": True} if stream else {}),
    }
    assert last["messages"][:2] == first["messages"]
    assert [message["role"] for message in last["messages"][2:]] == ["assistant", "tool"] * 2
    call = last["messages"][2]["tool_calls"][0]
    assert call["function"] == {"name": "bash", "arguments": '{"command": "echo hello > out.txt"}'}
    assert last["messages"][3] == {"role": "tool", "tool_call_id": call["id"], "content": "ok"}
    assert model.keys == {"key-1"}


async def test_it_stops_at_its_turns(scripted: Any, work: Path) -> None:
    model = scripted(["true"] * 9)
    assert (await run_agent(model, work, SHELL_MAX_TURNS="3"))[0] == 0
    assert len(model.requests) == 3


async def test_server_errors_are_tried_again_then_given_up(scripted: Any, work: Path) -> None:
    model = scripted([503, 429, None])
    assert (await run_agent(model, work))[0] == 0
    model = scripted([500] * 9)
    code, output = await run_agent(model, work, SHELL_RETRIES="2")
    assert (code, len(model.requests)) == (3, 3)
    assert "the server keeps failing: status 500" in output


async def test_a_refused_request_ends_it_at_once(scripted: Any, work: Path) -> None:
    model = scripted([400, None])
    code, output = await run_agent(model, work)
    assert (code, len(model.requests)) == (4, 1)
    assert "the server refused: status 400" in output


async def test_an_unreachable_server(scripted: Any, work: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    code, _ = await run_agent(scripted([]), work, OPENAI_BASE_URL=f"http://127.0.0.1:{port}/v1", SHELL_RETRIES="1")
    assert code == 3


async def test_without_an_instruction(scripted: Any, work: Path) -> None:
    assert (await run_agent(scripted([]), work, SHELL_INSTRUCTION="/nowhere"))[0] == 2


async def test_commands_are_bounded_and_do_not_see_the_key(scripted: Any, work: Path) -> None:
    commands = [
        "head -c 1000 /dev/zero | tr '\\0' x",
        "echo early; sleep 60",
        "sleep 60 & echo started",
        "env | grep -c -e OPENAI -e SHELL_ -e key-1",
        "printf '\\xff'",
        "cat",
    ]
    model = scripted([*commands, None])
    code, _ = await run_agent(model, work, SHELL_OUTPUT_LIMIT="100", SHELL_COMMAND_TIMEOUT="1")
    assert code == 0
    assert contents(model) == [
        "x" * 100 + "\n[900 more bytes]",
        "early\n[timed out]",
        "started",
        "0\n[exit code 1]",
        "\ufffd",
        "ok",
    ]


@pytest.mark.parametrize(
    "function",
    [
        {"name": "bash", "arguments": "{"},
        {"name": "bash", "arguments": '{"cmd": "true"}'},
        {"name": "bash", "arguments": '{"command": 1}'},
        {"name": "bash", "arguments": '["true"]'},
        {"name": "bash", "arguments": '{"command": "a\\u0000b"}'},
        {"name": "python", "arguments": '{"command": "true"}'},
        {},
    ],
)
def test_a_malformed_call_is_answered(function: dict[str, str]) -> None:
    message = shell_agent.answer({"id": "7", "function": function})
    assert (message["role"], message["tool_call_id"]) == ("tool", "7")
    assert message["content"].startswith("error: call bash with a command")


def test_the_agents_copy_of_the_prompt_is_the_same() -> None:
    assert shell_agent.SYSTEM == shell_prompt.SYSTEM == "You are a coding agent."
    assert shell_agent.TOOL == shell_prompt.TOOL
    for output, code in [("", 0), ("a\n", 0), ("", 1), ("a\n\n", 2), ("a", None), ("", None)]:
        assert shell_agent.tool_content(output, code) == shell_prompt.tool_content(output, code)


def test_the_agent_imports_the_standard_library_only() -> None:
    tree = ast.parse(AGENT.read_text())
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names


def test_the_launch(lab: Any) -> None:
    harness = find_harness("shell")
    request = LaunchRequest(
        task=lab.task(), port=8400, key="secret", model="m", max_turns=5, environment={"SHELL_STREAM": "1"}
    )
    launch = harness.prepare(request)
    assert "secret" not in " ".join(launch.argv)
    assert launch.env["OPENAI_API_KEY"] == "secret"
    assert launch.env["OPENAI_BASE_URL"] == "http://127.0.0.1:8400/v1"
    assert (launch.env["SHELL_MAX_TURNS"], launch.env["SHELL_STREAM"]) == ("5", "1")
    assert list(launch.files.values()) == ["Write hello to out.txt."]
    assert [bind.source for bind in launch.binds] == [AGENT]


def test_unknown_harness_and_version() -> None:
    with pytest.raises(UserError, match=r"harness.name = 'shel' is not known; known are .*shell"):
        find_harness("shel")
    harness = find_harness("shell")
    assert harness.check("") == harness.check(harness.check(""))
    with pytest.raises(UserError, match="harness.version = '9'"):
        harness.check("9")
