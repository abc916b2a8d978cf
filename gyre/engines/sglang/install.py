"""SGLang's own virtual environment, in the cache folder: built once from the pinned list, found by its contents.

Owns CACHE/engines/. Invariants: an environment counts only with its COMPLETE file, which is written last; its name
holds a digest of the list, so another list is another environment; two installations at a time build it once.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from gyre.errors import UserError
from gyre.ledger.files import alone
from gyre.ledger.layout import cache_home

VERSION = "0.5.23"
TORCH = "2.13.0"
HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements.txt"
SHIM = HERE / "cpu"
COMPLETE = "COMPLETE"
ENTRY_POINTS = {
    "METADATA": "Metadata-Version: 2.1\nName: gyre-sglang-cpu\nVersion: 1\n",
    "entry_points.txt": "[sglang.srt.plugins]\ngyre_cpu = gyre_sglang_cpu:register\n",
}
"""How SGLang finds the plugin: the metadata of an installed distribution."""
Say = Callable[[str], None]
Run = Callable[[Sequence[str]], None]


def environment(cache: Path | None = None) -> Path:
    """The folder of the environment that this version of gyre installs."""
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    digest = hashlib.sha256(REQUIREMENTS.read_bytes() + TORCH.encode()).hexdigest()[:8]
    return (cache or cache_home()) / "engines" / f"sglang-{VERSION}-{python}-{digest}"


def interpreter(cache: Path | None = None) -> Path:
    """Python of the installed environment. Raises UserError that says how to install it."""
    folder = environment(cache)
    if not (folder / COMPLETE).exists():
        raise UserError(
            f"rollout.engine: SGLang {VERSION} is not installed in {folder}: run `gyre engine install sglang`,"
            " or set rollout.python to the interpreter of an environment that has it"
        )
    return folder / "bin" / "python"


def install(say: Say, cache: Path | None = None, run: Run | None = None) -> Path:
    """Build the environment unless it is complete, and bring its CPU shim up to date; return its interpreter.

    `run` executes a command. Raises UserError when a package cannot be installed, with pip's last line.
    """
    folder = environment(cache)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with alone(folder.parent / f".{folder.name}.lock"):
        if not (folder / COMPLETE).exists():
            _build(folder, say, run or _run)
        _copy_shim(folder)
    return folder / "bin" / "python"


def _build(folder: Path, say: Say, run: Run) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # half of one, from an installation that was interrupted
    python = str(folder / "bin" / "python")
    quiet = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    say(f"SGLang {VERSION} for CPU: 2.8 GB, two to four minutes, into {folder}")
    run([sys.executable, "-m", "venv", str(folder)])
    say(f"1 of 2: torch {TORCH}")
    # With what it needs: pip may find a build for GPUs, whose libraries are packages of their own.
    run([python, *quiet, f"torch=={TORCH}"])
    say(f"2 of 2: {len(_pinned())} packages")
    run([python, *quiet, "--no-deps", "--requirement", str(REQUIREMENTS)])
    (folder / COMPLETE).write_text(f"sglang {VERSION}\n")


def _pinned() -> list[str]:
    lines = REQUIREMENTS.read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def _copy_shim(folder: Path) -> None:
    """Into site-packages: it follows gyre's version, while the packages stay."""
    (packages,) = folder.glob("lib/python*/site-packages")
    shutil.copytree(SHIM, packages, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    metadata = packages / "gyre_sglang_cpu-1.dist-info"
    metadata.mkdir(exist_ok=True)
    for name, text in ENTRY_POINTS.items():
        (metadata / name).write_text(text)


def _run(words: Sequence[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise UserError(f"{' '.join(words[1:4])}: {said[-1] if said else f'status {done.returncode}'}", code=1)
