"""Harness packages in a cache folder: from npm or PyPI, one folder a version, bound read-only into sandboxes.

Owns CACHE/harnesses/NAME/VERSION. Invariants: a folder has its name only once it is complete (installed aside, then
renamed) and is never written again; no package's install scripts run on the host.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct

from gyre.errors import UserError
from gyre.executions.sandbox import Bind
from gyre.ledger.layout import cache_home

INSIDE = "/run/gyre/harness"
"""Where a harness's folder is seen inside a sandbox."""
PYTHON = "/usr/bin/python3"
Run = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


class Package(Struct, frozen=True):
    """`tested`: versions that are known to work here, the preferred one first.

    `node`: from which version on it brings a Node of its own, since it needs a newer one than machines have.
    """

    name: str
    index: str
    tested: tuple[str, ...]
    node: str = ""


NODE = "node-linux-{machine}@22.23.3"
"""npm's package of the binary alone."""
MACHINES = {"x86_64": "x64", "aarch64": "arm64"}

PACKAGES = {
    "claude-code": Package("@anthropic-ai/claude-code", "npm", ("2.1.220", "2.1.332")),
    "codex": Package("@openai/codex", "npm", ("0.171.0",)),
    "mini-swe-agent": Package("mini-swe-agent", "pypi", ("2.4.6",)),
    "opencode": Package("opencode-ai", "npm", ("1.18.33",)),
    "qwen-code": Package("@qwen-code/qwen-code", "npm", ("0.15.10", "0.24.4"), node="0.16"),
}


def installed(name: str, cache: Path | None = None) -> list[str]:
    """The installed versions of a harness, the newest last."""
    folder = (cache or cache_home()) / "harnesses" / name
    found = [entry.name for entry in folder.iterdir() if entry.name[0] != "."] if folder.is_dir() else []
    return sorted(found, key=_version_key)


def folder_of(name: str, version: str, cache: Path | None = None) -> tuple[str, Path]:
    """(version, folder) of an installed harness; "" is the newest. Raises UserError that says how to install it."""
    versions = installed(name, cache)
    wanted = version or (versions[-1] if versions else "")
    if wanted not in versions:
        missing = wanted or PACKAGES[name].tested[0]
        raise UserError(
            f"harness.version: {name} {missing} is not installed; run `gyre harness install {name}@{missing}`"
        )
    return wanted, (cache or cache_home()) / "harnesses" / name / wanted


def bound(folder: Path) -> tuple[Bind, ...]:
    """The binds of an installed harness."""
    return (Bind(folder, INSIDE),)


def install(spec: str, cache: Path | None = None, run: Run | None = None) -> Path:
    """Install NAME@VERSION (or NAME: the preferred tested version), unless it is there, and return its folder.

    Raises UserError for an unknown name, a missing installer, or what the installer says.
    """
    name, _, version = spec.partition("@")
    if name not in PACKAGES:
        raise UserError(f"{name!r} is not a harness that can be installed; known: {', '.join(sorted(PACKAGES))}")
    package = PACKAGES[name]
    version = version or package.tested[0]
    if not version.replace(".", "").replace("-", "").isalnum():
        raise UserError(f"{version!r} is not a version, such as {package.tested[0]}")
    target = (cache or cache_home()) / "harnesses" / name / version
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{version}.", dir=target.parent))
    try:
        _fill(aside, package, version, run or _run)
        aside.chmod(0o755)
        aside.rename(target)
    except OSError as error:
        # A twin may have been faster: its folder is complete.
        if not target.is_dir():
            raise UserError(f"{target} cannot be installed: {error}", code=1) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target


def _fill(folder: Path, package: Package, version: str, run: Run) -> None:
    if package.index == "npm":
        quiet = ["--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error"]
        words = ["npm", "install", "--prefix", str(folder), *quiet, f"{package.name}@{version}"]
        if package.node and _version_key(version) >= _version_key(package.node):
            words.append(NODE.format(machine=MACHINES.get(platform.machine(), platform.machine())))
    else:
        # The sandbox runs the system's Python, which need not be this one.
        quiet = ["--quiet", "--disable-pip-version-check", "--only-binary=:all:", "--python-version", _python_version()]
        words = [sys.executable, "-m", "pip", "install", "--target", str(folder), *quiet, f"{package.name}=={version}"]
    done = run(words)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise UserError(f"{words[0]} could not install {package.name} {version}: {said[-1] if said else ''}", code=1)


def _run(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    except FileNotFoundError:
        raise UserError(f"{words[0]} is missing: install it first", code=1) from None


def _python_version() -> str:
    try:
        asked = subprocess.run([PYTHON, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], capture_output=True)
    except FileNotFoundError:
        raise UserError(f"{PYTHON} is missing: the sandbox runs this harness with it", code=1) from None
    return asked.stdout.decode().strip()


def _version_key(version: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in version.split(".")]
