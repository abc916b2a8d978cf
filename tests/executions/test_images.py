"""Images become root file systems: what layers do, what is refused, who builds, and executions that lie on one."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gyre.errors import UserError
from gyre.executions.check import check_tasks
from gyre.executions.grading import GRADED, grade
from gyre.executions.images import store
from gyre.executions.images.oci import read_oci
from gyre.executions.images.prepare import prepare_images
from gyre.executions.images.squashed import unpack_squashed
from gyre.executions.images.store import Image, Images, is_unpacked, unpacked
from gyre.executions.images.unpack import ImageError
from gyre.executions.tasks import Task, load_task
from tests.executions.image_lab import (
    ARCHITECTURE,
    Entry,
    layer,
    layer_of,
    write_oci,
    write_sif,
    write_squashfs,
)

ROOT = Path(__file__).parents[2]
BASE = "FROM small:1\nWORKDIR /app\n"


def tree(root: Path) -> dict[str, str]:
    """Each file's text, each link's target, "/" for folders without entries."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = f"-> {os.readlink(path)}"
        elif path.is_file():
            found[name] = path.read_text()
        elif not any(path.iterdir()):
            found[name] = "/"
    return found


def unpack(tmp_path: Path, *layers: bytes, how: str = "gzip") -> Path:
    write_oci(tmp_path / "image.tar", layers, how=how)
    return unpacked(Image(tmp_path / "image.tar"), tmp_path / "cache")


@pytest.mark.parametrize("how", ["gzip", "zstd", ""])
def test_later_layers_replace_and_hide(tmp_path: Path, how: str) -> None:
    below = layer(
        ("etc", None), ("etc/a", "1"), ("etc/b", "1"), ("data/x", "1"), ("data/deep/y", "1"), ("was-folder/z", "1"),
        ("was-file", "1"), ("kept/k", "1"), ("usr/bin", None), ("bin", ("link", "usr/bin")),
    )  # fmt: skip
    above = layer(
        ("etc/b", "2"), ("etc/.wh.a", ""), ("data/.wh..wh..opq", ""), ("data/new", "2"), ("was-folder", "2"),
        ("was-file", None), ("bin/tool", "2"), ("again", "2"), (".wh.again", ""), ("hard", ("hard", "etc/b")),
    )  # fmt: skip
    assert tree(unpack(tmp_path, below, above, how=how)) == {
        "etc/b": "2",
        "data/new": "2",
        "was-folder": "2",
        "was-file": "/",
        "kept/k": "1",
        "bin": "-> usr/bin",
        "usr/bin/tool": "2",
        "again": "2",  # a whiteout hides what lower layers have
        "hard": "2",
    }


def test_an_opaque_folder_keeps_what_its_own_layer_made_before_it(tmp_path: Path) -> None:
    above = layer(("d/sub/new", "2"), ("d/.wh..wh..opq", ""))
    assert tree(unpack(tmp_path, layer(("d/sub/old", "1"), ("d/x", "1")), above)) == {"d/sub/new": "2"}


OUTSIDE = "../" * 12
TRICKS: list[tuple[tuple[Entry, ...], str]] = [
    ((("/etc/passwd", "x"),), "an absolute name, or one with .., leaves the image"),
    ((("a/../../x", "x"),), "an absolute name, or one with .., leaves the image"),
    ((("out", ("link", OUTSIDE + "{outside}")), ("out/x", "x")), "climbs above the image's root"),
    ((("d/out", ("link", "../..")), ("d/out/x", "x")), "climbs above the image's root"),
    ((("out", ("link", OUTSIDE)), ("out/.wh.victim", "")), "climbs above the image's root"),
    ((("l", ("link", "l")), ("l/x", "x")), "a loop of links"),
    ((("h", ("hard", "../../victim")),), "an absolute name, or one with .."),
    ((("h", ("hard", "/victim")),), "an absolute name, or one with .."),
    ((("l", ("link", "{outside}/victim")), ("h", ("hard", "l"))), "a hard link to 'l', which is no file of the image"),
    ((("h", ("hard", "missing")),), "which is no file of the image"),
    ((("sda", tarfile.BLKTYPE),), "devices and pipes are refused"),
    ((("null", tarfile.CHRTYPE),), "devices and pipes are refused"),
    ((("pipe", tarfile.FIFOTYPE),), "devices and pipes are refused"),
    (((".wh...", ""),), "an absolute name, or one with .."),
    (((".wh.", ""),), "a whiteout of nothing"),
]


@pytest.mark.parametrize(("entries", "refusal"), TRICKS)
def test_tricks_are_refused_and_touch_nothing(tmp_path: Path, entries: tuple[Entry, ...], refusal: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "victim").write_text("whole")
    named: list[Entry] = []
    for name, what in entries:
        filled = (what[0], what[1].replace("{outside}", str(outside).lstrip("/"))) if isinstance(what, tuple) else what
        named.append((name, filled))
    with pytest.raises(UserError, match=r"image.tar: not a usable image: layer [0-9a-f]{12}: member ") as caught:
        unpack(tmp_path, layer(*named))
    assert refusal in str(caught.value)
    assert tree(outside) == {"victim": "whole"}
    assert [
        path for path in (tmp_path / "cache/images").iterdir() if not path.name.startswith((".known", ".sha"))
    ] == []


def test_absolute_links_stay_inside_and_nothing_is_privileged(tmp_path: Path) -> None:
    """A link to /etc is one of the image, as it would be for its own programs."""
    root = unpack(tmp_path, layer(("l", ("link", "/etc")), ("l/x", "x"), ("dev/null", tarfile.CHRTYPE)))
    assert tree(root) == {"l": "-> /etc", "etc/x": "x", "dev": "/"}
    privileged = tarfile.TarInfo("su")
    privileged.mode = 0o6777
    with tarfile.open(tmp_path / "layer", "w") as written:
        written.addfile(privileged)
    root = unpack(tmp_path, (tmp_path / "layer").read_bytes())
    assert stat.S_IMODE((root / "su").stat().st_mode) == 0o777


def test_a_damaged_blob_counts_for_nothing(tmp_path: Path) -> None:
    path = tmp_path / "image.tar"
    write_oci(path, [layer(("secret-name", "original"))], how="")
    path.write_bytes(path.read_bytes().replace(b"original", b"tampered"))
    with pytest.raises(UserError, match="image.tar: not a usable image: blob .* the archive is damaged"):
        unpacked(Image(path), tmp_path / "cache")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.write_bytes(b"no tar"), "not readable as an OCI archive: .* skopeo copy"),
        (lambda path: tarfile.open(path, "w").close(), "index.json is missing .*skopeo copy"),
        (lambda path: path.unlink(), ".*No such file"),
    ],
)
def test_what_is_no_oci_archive_is_named(tmp_path: Path, change: Any, message: str) -> None:
    path = tmp_path / "image.tar"
    write_oci(path, [])
    change(path)
    with pytest.raises(UserError, match=f"{path}: not a usable image: {message}") as caught:
        unpacked(Image(path), tmp_path / "cache")
    assert "\n" not in str(caught.value)


def test_the_image_for_this_machine_is_taken(tmp_path: Path) -> None:
    other = {"digest": "sha256:" + "0" * 64, "platform": {"os": "linux", "architecture": "s390x"}}
    attestation = {"digest": "sha256:" + "1" * 64, "platform": {"os": "unknown", "architecture": "unknown"}}
    path = tmp_path / "image.tar"
    config = {"Env": ["PATH=/opt/bin", "A=b=c"], "WorkingDir": "/srv"}
    digest = write_oci(path, [], config, entries=[other, attestation])
    image = read_oci(path)
    assert (image.digest, image.config.env, image.config.workdir) == (digest, {"PATH": "/opt/bin", "A": "b=c"}, "/srv")
    with tarfile.open(path) as archive:
        archive.extractall(tmp_path / "layout", filter="data")
    assert read_oci(tmp_path / "layout") == image
    write_oci(path, [], entries=[{**other, "platform": {"os": "linux", "architecture": ARCHITECTURE}}])
    with pytest.raises(ImageError, match="2 images for linux/"):
        read_oci(path)


def test_names_of_images(tmp_path: Path) -> None:
    for name in ("debian_12.tar", "org_name_tag.sif", "ghcr.io_a_b_1", "plain_latest.tar", "en+root+1.sqsh"):
        (tmp_path / name).touch()
    images = Images(tmp_path)

    def found(reference: str) -> str:
        image = images.find(reference)
        return image.path.name if image else ""

    assert found("debian:12") == found("docker.io/library/debian:12") == found("library/debian:12") == "debian_12.tar"
    assert found("org/name:tag") == "org_name_tag.sif"
    assert found("en/root:1") == "en+root+1.sqsh"
    assert found("ghcr.io/a/b:1") == "ghcr.io_a_b_1"
    assert found("plain") == found("plain:latest") == "plain_latest.tar"
    assert [found(name) for name in ("debian", "debian:11", "..", "", "../x")] == [""] * 5
    assert Images().find("debian:12") is None


def test_one_of_many_builders_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "image.tar"
    digest = write_oci(path, [layer(("x", "1"))])
    builds: list[str] = []
    build = store._build

    def counted(image: Image, folder: Path) -> None:
        builds.append(folder.name)
        build(image, folder)

    monkeypatch.setattr(store, "_build", counted)
    assert not is_unpacked(Image(path), tmp_path / "cache")
    with ThreadPoolExecutor(8) as pool:
        roots = set(pool.map(lambda _: unpacked(Image(path), tmp_path / "cache"), range(8)))
    assert builds == [digest.replace(":", "-")]
    assert roots == {tmp_path / "cache/images" / builds[0] / "root"}
    assert is_unpacked(Image(path), tmp_path / "cache")
    shutil.copy(path, tmp_path / "twin.tar")  # the same image under another name is the same root file system
    assert unpacked(Image(tmp_path / "twin.tar"), tmp_path / "cache") in roots
    assert len(builds) == 1


def test_a_build_that_died_leaves_no_half_image(tmp_path: Path) -> None:
    """A process is killed in the middle of a layer; the next builder is not kept waiting, and builds the whole."""
    path = tmp_path / "image.tar"
    write_oci(path, [layer(("x", "1")), layer(("y", "2"))])
    program = f"""
import os, pathlib
from gyre.executions.images import oci, store
done = []
def unpack(layer, root, real=oci.unpack_layer):
    real(layer, root)
    os.kill(os.getpid(), 9)
oci.unpack_layer = unpack
store.unpacked(store.Image(pathlib.Path({str(path)!r})), pathlib.Path({str(tmp_path / "cache")!r}))
"""
    died = subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
    assert died.returncode == -9
    assert not is_unpacked(Image(path), tmp_path / "cache")
    assert tree(unpacked(Image(path), tmp_path / "cache")) == {"x": "1", "y": "2"}


@pytest.mark.skipif(shutil.which("mksquashfs") is None, reason="apt-get install squashfs-tools")
@pytest.mark.parametrize(("write", "name"), [(write_sif, "image.sif"), (write_squashfs, "image.sqsh")])
def test_a_squashed_image(tmp_path: Path, write: Callable[[Path, Path], None], name: str) -> None:
    folder = tmp_path / "folder"
    (folder / "d").mkdir(parents=True)
    (folder / "d/x").write_text("1")
    (folder / "d/x").chmod(0o4755)
    (folder / "l").symlink_to("d")
    write(tmp_path / name, folder)
    root = unpacked(Image(tmp_path / name), tmp_path / "cache")
    assert tree(root) == {"d/x": "1", "l": "-> d"}
    assert stat.S_IMODE((root / "d/x").stat().st_mode) == 0o755
    os.mkfifo(folder / "pipe")
    write(tmp_path / name, folder)
    with pytest.raises(UserError, match="pipe: devices and pipes are refused"):
        unpacked(Image(tmp_path / name), tmp_path / "cache")


def test_a_sif_without_the_tool_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "image.sif").write_bytes(b"x" * 200)
    with pytest.raises(
        ImageError, match="neither a SIF nor a squashfs" if shutil.which("unsquashfs") else "unsquashfs is missing"
    ):
        unpack_squashed(tmp_path / "image.sif", tmp_path)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match=r"image.sif: not a usable image: unsquashfs is missing .*apptainer build"):
        unpacked(Image(tmp_path / "image.sif"), tmp_path / "cache")


# ---- executions on an image ----


def task_on(lab: Any, system: Path, form: str, **more: Any) -> tuple[Task, Images]:
    """A task whose base image `small:1` lies in a folder of images in one of the forms."""
    folder = lab.folder / "images"
    folder.mkdir(exist_ok=True)
    if form == "folder":
        shutil.copytree(system, folder / "small_1", symlinks=True, dirs_exist_ok=True)
    elif form == "oci":
        write_oci(folder / "small_1.tar", [layer_of(system)], {"Env": ["FROM_IMAGE=yes", "LEVEL=0"]}, how="")
    else:
        write_sif(folder / "small_1.sif", system)
    loaded = lab.task(**{"dockerfile": BASE, **more})
    return load_task(loaded.folder, images=Images(folder)), Images(folder)


@pytest.mark.parametrize("form", ["folder", "oci", "sif"])
@pytest.mark.every_kind
async def test_a_task_on_an_image(lab: Any, system: Path, cache: Path, form: str) -> None:
    if form == "sif" and shutil.which("mksquashfs") is None:
        pytest.skip("apt-get install squashfs-tools")
    task, _ = task_on(lab, system, form, dockerfile=BASE + "COPY Dockerfile seed\nENV LEVEL=1\n")
    look = (
        "cat /etc/which-system; ls /usr/bin/python3 /etc/debian_version 2>&1; cat seed; ls /tests; echo hello > out.txt"
    )
    status, output, snapshot = await lab.run(f"{look}; echo changed >/etc/which-system; rm /usr/bin/sh", task=task)
    assert output.splitlines()[:3] == [
        "small",
        "ls: cannot access '/usr/bin/python3': No such file or directory",
        "ls: cannot access '/etc/debian_version': No such file or directory",
    ]
    assert "FROM small:1" in output
    assert task.env["LEVEL"] == "1"
    assert form != "oci" or task.env["FROM_IMAGE"] == "yes"
    assert status.code == 0
    assert (snapshot / "etc/which-system").read_text() == "changed\n"
    assert task.image is not None
    assert (unpacked(task.image) / "etc/which-system").read_text() == "small\n"
    result = await grade(task, lab.sandbox, lab.root, snapshot, lab.folder / "grading", lab.limits)
    assert (result.reward, result.reason) == (1.0, GRADED), result.detail


@pytest.mark.every_kind
async def test_the_shell_agent_on_an_image_without_python(lab: Any, system: Path, cache: Path, scripted: Any) -> None:
    from gyre.executions.execution import CallReport, ExecutionRequest, Timeouts, run_execution
    from gyre.executions.harnesses import find_harness

    task, _ = task_on(lab, system, "folder")
    model = scripted(["cat /etc/which-system > out.txt", "echo hello > out.txt", None])
    request = ExecutionRequest(
        name="e-1", task=task, key="k", model="m", timeouts=Timeouts(harness=30, grader=30, execution=60)
    )
    result = await run_execution(
        request,
        find_harness("shell"),
        lab.sandbox,
        lab.root,
        model.serve,
        lambda: CallReport(len(model.requests)),
    )
    model.close()
    assert (result.outcome, result.reward, result.model_calls) == ("graded", 1.0, 3), result.detail


@pytest.mark.parametrize(
    "cheat",
    [
        "mkdir -p /logs/verifier; echo 1 >/logs/verifier/reward.txt",
        "rm -rf /logs; mkdir /x; echo 1 >/x/reward.txt; ln -s / /logs; ln -s x /verifier",
        "mkdir /fake; echo 'echo 1 >/logs/verifier/reward.txt' >/fake/test.sh; ln -s fake /tests",
        "echo /lib/evil.so >/etc/ld.so.preload",
        "mkdir -p /run/gyre/x 2>/dev/null; rm -rf /run/gyre/launcher.py; true",
    ],
)
@pytest.mark.every_kind
async def test_an_image_opens_no_way_to_the_reward(lab: Any, system: Path, cache: Path, cheat: str) -> None:
    task, _ = task_on(lab, system, "folder")
    _, _, snapshot = await lab.run(cheat, task=task)
    result = await grade(task, lab.sandbox, lab.root, snapshot, lab.folder / "grading", lab.limits)
    assert (result.reward, result.reason) == (0.0, GRADED), result.detail


async def test_a_prebuilt_image_stands_for_a_whole_dockerfile(lab: Any, system: Path, cache: Path) -> None:
    """Its own instructions are not read then, and its work directory is the task's, which names none."""
    folder = lab.folder / "images"
    folder.mkdir()
    dockerfile = "FROM ubuntu:24.04\nRUN apt-get install -y everything\n"
    with pytest.raises(UserError, match="Dockerfile:2: RUN is not covered .* put a prebuilt image of the task into"):
        lab.task(dockerfile=dockerfile)
    built = layer(("work/made-by-run", "yes"))
    write_oci(folder / "task.tar", [layer_of(system), built], {"WorkingDir": "/work"}, how="")
    task = load_task(lab.folder / "tasks/task", images=Images(folder))
    assert (task.workdir, task.environment.copies) == ("/work", ())
    _, output, _ = await lab.run("cat made-by-run", task=task)
    assert output == "yes"
    (task.folder / "task.toml").write_text('[environment]\ndocker_image = "org/one:2"\nworkdir = "/"\n')
    shutil.move(folder / "task.tar", folder / "org_one_2.tar")
    again = load_task(task.folder, images=Images(folder))
    assert again.image is not None
    assert (again.image.path.name, again.workdir) == ("org_one_2.tar", "/")


def test_a_base_that_is_not_there_is_named(lab: Any) -> None:
    folder = lab.folder / "images"
    folder.mkdir()
    lab.task(dockerfile=BASE)
    with pytest.raises(UserError, match=rf"tasks/task: image 'small:1' is not in {folder} \(as a folder"):
        load_task(lab.folder / "tasks/task", images=Images(folder))


async def test_prepare_and_check_tell_what_is_missing(lab: Any, system: Path, cache: Path) -> None:
    _, images = task_on(lab, system, "oci", name="a-good")
    lab.task(name="b-good", dockerfile=BASE)
    lab.task(name="c-gone", dockerfile="FROM nowhere:1\nWORKDIR /app\n")
    (lab.folder / "images/broken_1.tar").write_text("no archive")
    lab.task(name="d-broken", dockerfile="FROM broken:1\nWORKDIR /app\n")
    path = lab.folder / "tasks"
    seen: list[str] = []
    prepared = prepare_images(path, images, done=lambda found: seen.append(found.image))
    assert [(Path(p.image).name, p.tasks, p.built) for p in prepared] == [
        ("", ("c-gone",), False),
        ("", ("d-broken",), False),
        ("small_1.tar", ("a-good", "b-good"), True),
    ]
    assert "image 'nowhere:1' is not in" in prepared[0].problem
    assert "broken_1.tar: not a usable image" in prepared[1].problem
    assert sorted(seen) == [p.image for p in prepared]
    assert not prepare_images(path, images)[2].built
    checks = await check_tasks(path, lab.sandbox, lab.root, lab.limits, images=images)
    assert [check.problems == () for check in checks] == [True, True, False, False]
    assert [Path(check.image).name for check in checks] == ["small_1.tar", "small_1.tar", "", ""]


def test_the_command(lab: Any, system: Path, cache: Path) -> None:
    task_on(lab, system, "oci")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def gyre(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "gyre.cli.main", "tasks", *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    done = gyre("prepare", str(lab.folder / "tasks"), "--images", str(lab.folder / "images"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("small_1.tar: unpacked now (")
    assert done.stdout.endswith("1 of 1 images are ready\n")
    done = gyre("prepare", str(lab.folder / "tasks"), "--images", str(lab.folder / "images"), "--json")
    (found,) = json.loads(done.stdout)
    assert (found["built"], found["tasks"], found["problem"]) == (False, ["task"], "")
    assert Path(found["root"], "etc/which-system").is_file()
    done = gyre("prepare", str(lab.folder / "tasks"), "--images", str(lab.folder))
    assert done.returncode == 1
    assert "task: " in done.stdout and "image 'small:1' is not in" in done.stdout


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"Env": ["A=x\0--bind"]}, "env.A has a NUL character in it"),
        ({"Env": ["=x"]}, "env: '' cannot be the name of a variable"),
        ({"Env": [1]}, r"its configuration: Expected `str`, got `int` - at `\$.Env\[0\]`"),
        ({"User": {}}, r"its configuration: Expected `str \| null`, got `object` - at `\$.User`"),
    ],
)
def test_what_an_image_says_wrongly_of_itself(
    lab: Any, tmp_path: Path, cache: Path, config: dict[str, Any], message: str
) -> None:
    folder = lab.task(dockerfile=BASE).folder
    write_oci(tmp_path / "small_1.tar", [layer(("x", None))], config)
    with pytest.raises(UserError, match=message) as caught:
        load_task(folder, images=Images(tmp_path))
    assert "\n" not in str(caught.value)
