"""Users other than root, in the kinds of sandbox that have them: who they are, and what is theirs to write."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from gyre.errors import UserError
from gyre.executions.dockerfile import read_dockerfile
from gyre.executions.grading import grade
from gyre.executions.layers import private_folder
from gyre.executions.sandbox import ExitStatus
from gyre.executions.users import User, find_user, layers_of, writable_places

pytestmark = pytest.mark.every_kind(but=("apptainer",))
AGENT = User(1234, 2345, "agent", "/home/agent")


@pytest.fixture
def layer(tmp_path: Path) -> Path:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_text("root:x:0:0::/root:/bin/bash\nagent:x:1234:2345::/home/agent:/bin/bash\n")
    (tmp_path / "etc/group").write_text("root:x:0:\nwheel:x:77:\n")
    return tmp_path


@pytest.mark.parametrize(
    ("wanted", "user"),
    [
        ("", None),
        ("root", None),
        ("0:0", None),
        ("agent", AGENT),
        ("1234", AGENT),
        ("agent:wheel", User(1234, 77, "agent", "/home/agent")),
        ("1234:78", User(1234, 78, "agent", "/home/agent")),
        ("5000", User(5000, 0)),
    ],
)
def test_a_user_is_found_by_name_and_by_number(layer: Path, wanted: str, user: User | None) -> None:
    assert find_user(wanted, (layer,), on_image=True) == user


@pytest.mark.parametrize(
    ("wanted", "message"), [("nobody-here", "not in the image's /etc/passwd"), ("agent:none", "its group is not in")]
)
def test_an_unknown_user_is_one_line(layer: Path, wanted: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        find_user(wanted, (layer,), on_image=True)
    assert "\n" not in str(refused.value)


def test_the_host_stands_in_for_an_image_and_its_line_is_carried(layer: Path) -> None:
    (layer / "etc/passwd").write_text("root:x:0:0::/root:/bin/bash\n")
    found = find_user("daemon", (layer,), on_image=False)
    assert found is not None and found.line.startswith("daemon:")
    with pytest.raises(UserError, match="not in the image's"):
        find_user("daemon", (layer,), on_image=True)


def test_passwd_behind_a_link_is_not_read(layer: Path, tmp_path: Path) -> None:
    above = tmp_path / "above"
    (above / "etc").mkdir(parents=True)
    (above / "etc/passwd").symlink_to(layer / "etc/passwd")
    with pytest.raises(UserError):
        find_user("agent", (layer, above), on_image=True)


def test_writable_places_are_disjoint_and_never_the_root() -> None:
    assert writable_places(AGENT, "/home/agent/work") == (
        "/home/agent",
        "/logs/agent",
        "/logs/artifacts",
        "/tmp",
        "/var/tmp",
    )
    assert "/" not in writable_places(User(1, 1), "/")


def test_layers_of_a_place_stop_at_links_files_and_opaque_folders(tmp_path: Path) -> None:
    layers = tuple(tmp_path / name for name in ("lowest", "middle", "upper"))
    for folder in layers:
        (folder / "a/b").mkdir(parents=True)
    assert layers_of("/a/b", layers) == [folder / "a/b" for folder in layers]
    os.setxattr(layers[1] / "a", "user.overlay.opaque", b"y")
    assert layers_of("/a/b", layers) == [layers[1] / "a/b", layers[2] / "a/b"]
    (layers[1] / "a/b").rmdir()
    assert layers_of("/a/b", layers) == [layers[2] / "a/b"]
    (layers[1] / "a").rmdir()
    (layers[1] / "a").symlink_to("/etc")
    assert layers_of("/a/b", layers) == [layers[2] / "a/b"]


@pytest.fixture
def hosts_user() -> User:
    found = find_user("daemon", (), on_image=False)
    assert found is not None
    return found


async def test_the_command_runs_as_the_user(lab: Any) -> None:
    user = User(1234, 2345, "agent", "/home/agent", line="agent:x:1234:2345::/home/agent:/bin/bash")
    status, output, snapshot = await lab.run(
        "id -un; id -u; id -g; echo $HOME $USER; echo mine > ~/file; echo work > out.txt; stat -c %u out.txt",
        user=user,
    )
    assert (status, output.split()) == (
        ExitStatus(code=0),
        ["agent", "1234", "2345", "/home/agent", "agent", "1234"],
    )
    assert (snapshot / "app/out.txt").read_text() == "work\n"
    assert (snapshot / "home/agent/file").read_text() == "mine\n"


@pytest.mark.parametrize(
    "command",
    [
        "echo x > /etc/passwd",
        "echo x > /opt/new",
        "echo x > /home/new",
        "chmod 0777 /etc",
        "rm /etc/hosts",
        "mv /etc/hosts /tmp/hosts",
        "ln -s /tmp /srv/link",
        "ls /root",
        "chmod 0755 /root",
        "mkdir /root/x",
        "unshare -Ur true",
    ],
)
async def test_what_is_roots_cannot_be_changed(lab: Any, command: str) -> None:
    status, output, snapshot = await lab.run(command, user=AGENT)
    assert status.code not in (0, None)
    assert any(why in output for why in ("Read-only file system", "Permission denied", "No space", "not permitted"))
    assert not (snapshot / "etc").exists()


async def test_no_capability_is_left(lab: Any) -> None:
    _, output, _ = await lab.run("grep -E 'Cap(Prm|Eff|Bnd|Amb)' /proc/self/status", user=AGENT)
    assert {line.split()[1] for line in output.splitlines()} == {"0" * 16}


async def test_seeded_files_and_deletions_are_as_in_one_overlay(lab: Any) -> None:
    task = lab.task(dockerfile="FROM x\nWORKDIR /app\nCOPY Dockerfile seed.txt\nCOPY Dockerfile gone.txt\n")
    status, _, snapshot = await lab.run("echo more >> seed.txt && rm gone.txt && mkdir new", task=task, user=AGENT)
    assert status == ExitStatus(code=0)
    spec = lab.spec("tail -n 1 seed.txt; echo *", task=task)
    spec = structs.replace(spec, lowers=(*spec.lowers, snapshot))
    running = await lab.sandbox.start(spec)
    await running.wait(20)
    await running.kill()
    assert spec.log.read_text().split() == ["more", "new", "seed.txt"]


VERIFIER_TOML = '[agent]\nuser = "games"\n[verifier]\nuser = 4321\n'
WHO = (
    "#!/bin/bash\n[[ $(id -u) == 4321 && $(cat out.txt) == hello ]] && touch mine && ! touch /etc/mine && r=1 || r=0\n"
)


async def test_the_verifier_is_another_user_than_the_agent(lab: Any) -> None:
    task = lab.task(test_sh=WHO + "echo $r > /logs/verifier/reward.txt\n", toml=VERIFIER_TOML)
    user = lab.sandbox.user(lab.root, task, task.agent_user)
    status, output, snapshot = await lab.run("id -un; echo hello > out.txt", task=task, user=user)
    assert (status, output) == (ExitStatus(code=0), "games\n")
    grading = private_folder(lab.folder / "grading")
    result = await grade(task, lab.sandbox, lab.root, snapshot, grading, lab.limits)
    assert (result.reward, result.detail) == (1.0, "")


async def test_a_link_that_the_agent_left_leads_the_verifier_nowhere(lab: Any) -> None:
    """The verifier's home is an overlay of its own: a link that the agent, as root, put there must not be followed."""
    toml = '[verifier]\nuser = "games"\n'
    secret = lab.folder / "secret"
    secret.mkdir()
    (secret / "found").touch()
    check = "#!/bin/bash\n[[ ! -e ~/found ]] && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n"
    task = lab.task(test_sh=check, toml=toml)
    games = lab.sandbox.user(lab.root, task, "games")
    home = games.home
    _, _, snapshot = await lab.run(
        f"mkdir -p $(dirname {home}) && ln -s {secret} {home} && rm -rf /tmp && ln -s {secret} /tmp", task=task
    )
    result = await grade(task, lab.sandbox, lab.root, snapshot, private_folder(lab.folder / "g"), lab.limits)
    assert result.reward == 1.0, result
    assert [entry.name for entry in secret.iterdir()] == ["found"]


def test_the_dockerfiles_user(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM x\nUSER agent\nWORKDIR /app\nUSER 12:13\n")
    assert read_dockerfile(tmp_path / "Dockerfile").user == "12:13"


async def test_an_unknown_user_is_told_before_anything_starts(lab: Any) -> None:
    task = lab.task(toml='[agent]\nuser = "nobody-here"\n')
    with pytest.raises(OSError, match="user 'nobody-here' is not in this machine's /etc/passwd"):
        lab.sandbox.user(lab.root, task, task.agent_user)
