"""The code of a run: its version, and a snapshot of the package when it runs from a checkout.

Invariant: what a queued or requeued job runs is what was submitted, whatever happens to the checkout meanwhile. An
installed package is not copied: nobody edits it in place.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import gyre
from gyre.ledger.layout import RunFolder

PACKAGE = Path(gyre.__file__).parent


def checkout() -> Path | None:
    """The checkout that this package runs from; None when it is installed."""
    home = PACKAGE.parent
    return home if (home / "pyproject.toml").is_file() else None


def code_version() -> str:
    """0.1.0, and for a checkout with git its commit: 0.1.0+3f2a9c1d, with .edited when the package was changed."""
    home = checkout()
    commit = _git(home, "rev-parse", "--short=8", "HEAD") if home is not None else ""
    if not commit:
        return gyre.__version__
    edited = ".edited" if _git(home, "status", "--porcelain", "--", "gyre") else ""
    return f"{gyre.__version__}+{commit}{edited}"


def _git(home: Path | None, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=home, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""  # no git here: the version number has to do
    return done.stdout.strip() if done.returncode == 0 else ""


def snapshot(run: RunFolder) -> Path | None:
    """Copy the package to RUN/launch/code; the folder for PYTHONPATH, None for an installed package."""
    if checkout() is None:
        return None
    code = run.launch / "code"
    if not code.exists():
        aside = run.launch / "code.partial"
        shutil.rmtree(aside, ignore_errors=True)
        shutil.copytree(PACKAGE, aside / "gyre", ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
        aside.rename(code)
    return code
