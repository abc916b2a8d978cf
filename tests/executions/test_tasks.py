"""Reading task folders: what is read, and how what is wrong is said."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from gyre.errors import UserError
from gyre.executions.harnesses import find_harness, refuse_instruction
from gyre.executions.harnesses.packaged import ARGUMENT_BYTES
from gyre.executions.layers import remove_tree
from gyre.executions.limits import MIB, Limits, Usage, disk_usage, exceeded, recipe_limits
from gyre.executions.tasks import load_task, load_tasks
from gyre.recipe import schema

FULL = """
schema_version = "1.4"
artifacts = ["x"]
[task]
name = "org/full"
[metadata]
anything = { goes = 1 }
[agent]
timeout_sec = 12
network_mode = "no-network"
[verifier]
timeout_sec = 34.5
env = { MODE = "${MODE:-fast}", USER_KEY = "a${SET}b" }
[environment]
cpus = 2
memory_mb = 256
storage_mb = 1024
workdir = "/work"
env = { LEVEL = "3" }
[solution]
env = { HINT = "x" }
"""


def test_a_full_task(lab: Any) -> None:
    folder = lab.task(toml="").folder
    (folder / "task.toml").write_text(FULL)
    task = load_task(folder, {"SET": "-"})
    assert task.name == "task"
    assert task.instruction == "Write hello to out.txt."
    assert (task.agent_timeout, task.verifier_timeout) == (12.0, 34.5)
    assert (task.memory, task.storage) == (256 * MIB, 1024 * MIB)
    assert task.workdir == "/work"
    assert task.env == {"LEVEL": "3"}
    assert task.verifier_env == {"MODE": "fast", "USER_KEY": "a-b"}
    assert task.solution_env == {"HINT": "x"}


def test_defaults_and_older_keys(lab: Any) -> None:
    task = lab.task(toml='version = "1.0"\n[environment]\nmemory = "2G"\nstorage = "512M"\n')
    assert (task.agent_timeout, task.verifier_timeout, task.workdir) == (0.0, 600.0, "/app")
    assert (task.memory, task.storage) == (2048 * MIB, 512 * MIB)


def test_canary_lines_are_stripped_and_no_others(lab: Any) -> None:
    folder = lab.task().folder
    text = "<!-- CANARY GUID 1 -->\n# benchmark canary 2\n\n# Title\nA canary sings.\n# canary 3\n"
    (folder / "instruction.md").write_text(text)
    assert load_task(folder).instruction == "# Title\nA canary sings.\n# canary 3"


def test_tasks_are_sorted_by_name(lab: Any) -> None:
    for name in ("b", "a", "c"):
        folder = lab.task(name=name).folder
    (folder.parent / ".hidden").mkdir()
    assert [task.name for task in load_tasks(folder.parent)] == ["a", "b", "c"]
    assert [task.name for task in load_tasks(folder)] == ["c"]


def test_the_digest_names_the_environment(lab: Any) -> None:
    task = lab.task()
    assert load_task(task.folder).digest == task.digest
    (task.folder / "environment/more").touch()
    assert load_task(task.folder).digest != task.digest


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("not toml", "task.toml: not readable as TOML"),
        ("[agent]\ntimeout_sec = 'soon'", r"task.toml: .*\$.agent.timeout_sec"),
        ("[agent]\ntimeout_sec = -1", "agent.timeout_sec must be"),
        ("[verifier]\ntimeout_sec = nan", "verifier.timeout_sec must be"),
        ("schema_version = '2.0'", "schema_version '2.0' is not one of 1.0"),
        ("[[steps]]\nname = 'x'", "step 'x': there is no folder"),
        ("[environment]\ngpus = 1", "gpus is not covered"),
        ("[environment]\nmcp_servers = [{}]", "mcp_servers is not covered"),
        ("[environment]\nhealthcheck = {}", "missing required field `command`"),
        ("[environment]\nhealthcheck = { command = ' ' }", "environment.healthcheck: command is empty"),
        ("[environment]\nhealthcheck = { command = 'x', retries = 0 }", "environment.healthcheck: retries must be"),
        (
            "[environment]\nhealthcheck = { command = 'x', timeout_sec = nan }",
            "healthcheck: its times must",
        ),
        ("[environment]\nskills_dir = '/skills'", "environment.skills_dir is not covered"),
        ("[environment]\nos = 'Windows'", 'environment.os other than "linux" is not covered'),
        ("[environment]\ntpu = { type = 'v4', topology = '2x2' }", "environment.tpu is not covered"),
        ("[environment]\nnetwork_mode = 'allowlist'", 'network_mode = "allowlist" .* is not covered'),
        ("[agent]\nnetwork_mode = 'Public'", r"Invalid enum value 'Public' - at `\$.agent.network_mode`"),
        ("[agent]\nnetwork_mode = 'allowlist'", 'network_mode = "allowlist" .* is not covered'),
        ("artifacts = ['../x']", "artifacts: '../x' must be a path of the main service"),
        ("artifacts = [{ source = '/x', service = 'db' }]", "artifacts: '/x' must be a path of the main service"),
        (
            "[verifier.environment]\ndocker_image = 'x'",
            "verifier.environment.docker_image 'x' is not in sandbox.images",
        ),
        ("[verifier.environment]\nworkdir = 'x'", "verifier.environment.workdir 'x' must be an absolute path"),
        ("[verifier.environment]\nmemory = 'lots'", "verifier.environment.memory 'lots' is not a size"),
        ("[environment]\nstorage_mb = -1", "environment.storage_mb must be a number of MiB, not -1"),
        (
            "[environment]\nmemory = '2G'\nmemory_mb = 1024",
            "environment.memory '2G' is not environment.memory_mb = 1024",
        ),
        ("[verifier.environment]\ngpus = 1", "verifier.environment.gpus is not covered"),
        ("[verifier]\nenvironment_mode = 'shared'\n[verifier.environment]\ndocker_image = 'x'", "is not covered"),
        ("[[verifier.collect]]\ncommand = 'x'", r"\[\[verifier.collect\]\] .* is not covered"),
        ("[environment]\nmemory = 'lots'", "environment.memory 'lots' is not a size"),
        ("[environment]\nworkdir = '../x'", "environment.workdir '../x' must be an absolute path"),
        ("[environment]\nenv = { A = '${GYRE_TEST_UNSET}' }", "needs the environment variable GYRE_TEST_UNSET"),
        ("[verifier]\nenvironment_mode = 'both'", r"Invalid enum value 'both' - at `\$.verifier.environment_mode`"),
    ],
)
def test_what_is_wrong_in_task_toml(lab: Any, toml: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        lab.task(toml=toml)
    assert str(lab.folder) in str(caught.value)
    assert "\n" not in str(caught.value).strip() or "TOML" in message


@pytest.mark.parametrize(
    ("dockerfile", "message"),
    [
        ("FROM x\nRUN apt-get update", "Dockerfile:2: RUN is not covered"),
        ("# note\n\nFROM x AS y", "Dockerfile:3: FROM with options or stages"),
        ("FROM x\nFROM y", "Dockerfile:2: FROM is not covered"),
        ("WORKDIR /x", "no FROM line"),
        ("FROM x\nCOPY missing /app/", "Dockerfile:2: COPY source 'missing' does not exist"),
        ("FROM x\nCOPY ../tests /app/", r"COPY source '../tests' lies outside"),
        ("FROM x\nCOPY one", "COPY needs a source and a target"),
        ("FROM x\nCOPY --chown=1 a b", "COPY with options or wildcards"),
        ("FROM x\nCOPY *.txt /app/", "COPY with options or wildcards"),
        ("FROM x\nWORKDIR $HOME", "Dockerfile:2: variables and empty values"),
        ("FROM x\nCOPY [1, 2]", "COPY needs"),
        ("FROM x\nCOPY [broken", "COPY's list is not valid JSON"),
    ],
)
def test_what_is_not_covered_in_a_dockerfile(lab: Any, dockerfile: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        lab.task(dockerfile=dockerfile)


async def test_copies_land_as_docker_puts_them(lab: Any) -> None:
    environment = lab.task().folder / "environment"
    (environment / "folder/deep").mkdir(parents=True)
    (environment / "folder/deep/x").write_text("x")
    dockerfile = """# syntax=docker/dockerfile:1
    FROM debian:12
    WORKDIR /app
    WORKDIR sub
    COPY Dockerfile ./one
    COPY folder \\
        # a comment between
        /data
    COPY ["Dockerfile", "folder/deep/x", "/many/"]
    COPY folder/deep/x .
    """
    (environment / "Dockerfile").write_text(dockerfile)
    task = load_task(environment.parent)
    assert task.workdir == "/app/sub"
    seed = lab.sandbox.lowers(lab.root, task)[1]
    files = sorted(str(path.relative_to(seed)) for path in seed.rglob("*") if path.is_file())
    assert files == ["app/sub/one", "app/sub/x", "data/deep/x", "many/Dockerfile", "many/x"]


@pytest.mark.parametrize("name", ["instruction.md", "task.toml", "tests/test.sh"])
def test_missing_files(lab: Any, name: str) -> None:
    folder = lab.task().folder
    (folder / name).unlink()
    with pytest.raises(UserError, match=f"{name}: missing"):
        load_task(folder)


def test_other_mistakes(lab: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder of tasks"):
        load_tasks(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no task folders"):
        load_tasks(tmp_path / "empty")
    folder = lab.task().folder
    (folder / "instruction.md").write_text("# canary\n \n")
    with pytest.raises(UserError, match="the instruction is empty"):
        load_task(folder)
    (folder / "instruction.md").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="not readable"):
        load_task(folder)


@pytest.mark.parametrize("kind", ["folder", "pipe", "link", "loop"])
@pytest.mark.parametrize("name", ["instruction.md", "task.toml", "tests/test.sh"])
def test_what_is_no_file(lab: Any, name: str, kind: str) -> None:
    path = lab.task().folder / name
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(path.name if kind == "loop" else "/nowhere")
    with pytest.raises(UserError, match=f"{name}: no file; a task needs"):
        load_task(lab.folder / "tasks/task")


@pytest.mark.parametrize("name", ["environment", "tests", "solution"])
def test_a_folder_that_leads_out_of_the_task(lab: Any, tmp_path: Path, name: str) -> None:
    folder = lab.task().folder
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=f"{name}: leads out of the task's folder"):
        load_task(folder)


def test_links_to_themselves(lab: Any) -> None:
    folder = lab.task().folder
    (folder / "environment/loop").symlink_to("loop")
    (folder / "tests/loop").symlink_to(".")
    assert load_task(folder).name == "task"
    (folder / "environment/Dockerfile").write_text("FROM x\nCOPY loop /loop\n")
    with pytest.raises(UserError, match="COPY source 'loop' does not exist"):
        load_task(folder)


def test_two_formats_and_a_folder_of_folders(lab: Any) -> None:
    folder = lab.task().folder
    with pytest.raises(UserError, match="tasks: a folder of tasks, and no task: give it as the path"):
        load_task(folder.parent)
    (folder / "task.yaml").touch()
    with pytest.raises(UserError, match=r"task: a task of several formats \(harbor, terminal-bench\)"):
        load_task(folder)


def test_what_cannot_be_read_is_one_line(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="not readable: .*File name too long"):
        load_tasks(Path("x" * 300))
    folder = lab.task().folder

    def closed(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", closed)
    with pytest.raises(UserError, match=f"{folder}: not readable: .*Permission denied"):
        load_task(folder)


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ('[environment]\nenv = { A = "x\\u0000--bind" }', r"env.A has a NUL character in it"),
        ('[environment]\nenv = { "A\\u0000" = "x" }', r"env: 'A\\x00' has a NUL character in it"),
        ('[verifier]\nenv = { "A=B" = "x" }', "verifier_env: 'A=B' cannot be the name of a variable"),
        ('[solution]\nenv = { "" = "x" }', "solution_env: '' cannot be the name of a variable"),
        ('[environment]\nworkdir = "/a\\u0000b"', "workdir has a NUL"),
        ('[environment]\ndocker_image = "a\\u0000b"', "docker_image has a NUL"),
        ('[environment.healthcheck]\ncommand = "a\\u0000b"', "healthcheck.command has a NUL"),
        ('artifacts = ["a\\u0000b"]', "artifacts has a NUL"),
        ('[verifier.environment]\nenv = { A = "\\u0000" }', "own_verifier.env.A has a NUL"),
    ],
)
def test_what_no_process_can_be_given(lab: Any, toml: str, message: str) -> None:
    """A NUL ends an argument: what follows it would be an option of the sandbox's."""
    with pytest.raises(UserError, match=message) as caught:
        lab.task(toml=toml)
    assert "\0" not in str(caught.value)


def test_nul_in_an_instruction_or_a_dockerfile(lab: Any) -> None:
    folder = lab.task().folder
    (folder / "environment/Dockerfile").write_text("FROM x\nENV A=\0\n")
    with pytest.raises(UserError, match="Dockerfile: has a NUL character"):
        load_task(folder)
    (folder / "environment/Dockerfile").write_text("FROM x\n")
    (folder / "instruction.md").write_text("a\0b")
    with pytest.raises(UserError, match="instruction has a NUL character"):
        load_task(folder)


async def test_an_instruction_is_as_long_as_an_argument_may_be(lab: Any) -> None:
    harness = find_harness("claude-code")
    folder = lab.task().folder
    longest = "x" * ARGUMENT_BYTES
    (folder / "instruction.md").write_text(longest)
    task = load_task(folder)
    refuse_instruction(harness, task)
    spec = structs.replace(lab.spec(""), argv=("bash", "-c", "echo ${#1}", "bash", longest))
    running = await lab.sandbox.start(spec)
    await running.wait(20)
    await running.kill()
    assert spec.log.read_text() == f"{ARGUMENT_BYTES}\n"
    (folder / "instruction.md").write_text(longest + "x")
    with pytest.raises(
        UserError, match=r"task: the instruction has 131072 bytes, and claude-code is started with 131071"
    ):
        refuse_instruction(harness, load_task(folder))
    refuse_instruction(find_harness("shell"), load_task(folder))


def test_an_image_without_a_dockerfile_and_compose_are_refused(lab: Any) -> None:
    folder = lab.task(toml="[environment]\ndocker_image = 'org/image:1'\n").folder
    (folder / "environment/Dockerfile").unlink()
    with pytest.raises(UserError, match="docker_image 'org/image:1' is not in sandbox.images"):
        load_task(folder)
    (folder / "environment/compose.yaml").touch()
    with pytest.raises(UserError, match="compose files are not covered"):
        load_task(folder)


@pytest.mark.parametrize(
    ("usage", "over"),
    [
        (Usage(memory=10, processes=10, disk=10, files=10), ""),
        (Usage(memory=11, processes=11), "memory"),
        (Usage(processes=11), "processes"),
        (Usage(disk=11), "disk"),
        (Usage(files=11), "files"),
    ],
)
def test_exceeded(usage: Usage, over: str) -> None:
    assert exceeded(usage, Limits(memory=10, processes=10, disk=10, files=10)) == over


def test_recipe_limits() -> None:
    settings = schema.Sandbox(memory_mb=1, disk_mb=2, processes=3, open_files=4)
    assert recipe_limits(settings) == Limits(memory=MIB, disk=2 * MIB, processes=3, open_files=4)


def test_a_task_narrows_limits_and_never_widens_them() -> None:
    limits = Limits(memory=100, disk=100)
    assert limits.narrowed(0, 0) == limits
    assert (limits.narrowed(50, 200).memory, limits.narrowed(50, 200).disk) == (50, 100)


def test_disk_usage_follows_no_link_and_lets_nothing_hide(tmp_path: Path) -> None:
    limits = Limits(disk=10 * MIB, files=3000)
    (tmp_path / "file").write_bytes(b"x" * 100_000)
    (tmp_path / "link").symlink_to("/usr")
    usage = disk_usage(tmp_path, limits)
    assert usage.files == 2
    assert 100_000 <= usage.disk < 120_000
    home = os.open(".", os.O_RDONLY)
    try:
        os.chdir(tmp_path)
        for _ in range(50):
            os.mkdir("d" * 100)
            os.chdir("d" * 100)
    finally:
        os.chdir(home)
        os.close(home)
    assert exceeded(disk_usage(tmp_path, limits), limits) == "files"
    remove_tree(tmp_path)
    assert not tmp_path.exists()
