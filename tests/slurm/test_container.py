"""The definition of the container image: not built here, but true to the package that it installs."""

from __future__ import annotations

import re
import tomllib

from tests.slurm.cluster import ROOT

DEFINITION = (ROOT / "slurm" / "gyre.def").read_text()
SECTIONS = ("arguments", "files", "post", "environment", "runscript", "test", "labels")


def sections() -> dict[str, str]:
    """Name -> body; "" for the header."""
    parts = re.split(r"^%(\w+)$", DEFINITION, flags=re.MULTILINE)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def test_it_has_a_header_and_known_sections_once() -> None:
    names = re.findall(r"^%(\w+)", DEFINITION, flags=re.MULTILINE)
    assert sorted(names) == sorted(SECTIONS)
    header = [line for line in sections()[""].splitlines() if line and not line.startswith("#")]
    assert [line.partition(":")[0] for line in header] == ["Bootstrap", "From"]


def test_every_argument_that_is_used_has_a_value() -> None:
    given = dict(line.strip().split("=") for line in sections()["arguments"].split())
    assert set(re.findall(r"{{ (\w+) }}", DEFINITION)) == set(given)


def test_it_copies_files_that_are_there_and_all_that_the_build_names() -> None:
    copied = [line.split() for line in sections()["files"].splitlines() if line.strip()]
    assert all((ROOT / source).exists() for source, _ in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert {project["project"]["readme"], "pyproject.toml", "gyre"} <= {source for source, _ in copied}


def test_it_installs_what_the_checkout_installs() -> None:
    post, makefile = sections()["post"], (ROOT / "Makefile").read_text()
    packages = re.search(r"^APT := (.*)$", makefile, flags=re.MULTILINE)
    assert packages is not None
    assert set(packages[1].split()) <= set(post.split())
    torch = re.search(r"torch==[\d.]+", makefile)
    assert torch is not None
    assert torch[0] in post
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = re.search(r"\[([\w,{} -]+)\]\"", post)
    assert wanted is not None
    given = dict(line.strip().split("=") for line in sections()["arguments"].split())
    extras = wanted[1].replace("{{ MOONCAKE }}", given["MOONCAKE"]).split(",")
    assert set(extras) <= set(project["optional-dependencies"])
    assert tuple(map(int, given["PYTHON"].split("."))) >= (3, 11)
