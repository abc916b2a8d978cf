"""The model of a run: a folder, or one that a script of the recipe builds at first use.

Owns the cache of built models. A build script takes `--out DIR --seed N`, makes the folder aside and renames it, with a
COMPLETE file in it; with `--key` it only prints a name for what it would make. Invariant: a cached folder is complete,
and is the one that the script would make now.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from gyre.errors import UserError
from gyre.ledger.layout import cache_home
from gyre.recipe.schema import Model

COMPLETE = "COMPLETE"


def resolve_model(model: Model, seed: int, say: Callable[[str], None], build: bool = True) -> Path:
    """The model's folder; builds it when `model.build` says so and the cache lacks it. Raises UserError.

    Without `build`, it is where the folder will be.
    """
    if model.path:
        folder = Path(model.path)
        if not (folder / "config.json").is_file():
            raise UserError(f"model.path: {folder} has no config.json: give a Hugging Face folder")
        if not any(folder.glob("*.safetensors")):
            raise UserError(f"model.path: {folder} has no *.safetensors: gyre reads weights in no other format")
        if not (folder / "tokenizer.json").is_file():
            raise UserError(f"model.path: {folder} has no tokenizer.json")
        return folder
    path, arguments = Path(model.build), model.build_arguments
    if not path.is_file():
        raise UserError(f"model.build: {path} does not exist")
    out = cache_home() / "models" / f"{path.parent.name}-{_key(path, arguments, seed)}"
    if build:
        build_model(model, seed, out, say)
    return out


def build_model(model: Model, seed: int, out: Path, say: Callable[[str], None]) -> None:
    """Build it in `out`, unless that was done before. Raises UserError."""
    if not (out / COMPLETE).exists():
        path = Path(model.build)
        say(f"building the model with {path.name} (once; cached in {out})")
        _build(path, model.build_arguments, seed, out)


def _key(script: Path, arguments: list[str], seed: int) -> str:
    """What the script says names the model that it makes: its `--key`."""
    argv = [sys.executable, str(script), *arguments, "--seed", str(seed), "--key"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    key = done.stdout.strip()
    if done.returncode != 0 or not key.isalnum():
        problem = done.stderr.strip().splitlines()[-1:] or ["it printed no key"]
        raise UserError(f"model.build: {script} --key failed: {problem[0]}", code=1)
    return key


def _build(script: Path, arguments: list[str], seed: int, out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, str(script), *arguments, "--out", str(out), "--seed", str(seed)]
    # a script may import what lies beside it
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    code = subprocess.run(argv, env={**environment, "OMP_NUM_THREADS": "1"}, check=False).returncode
    if code != 0:
        raise UserError(f"model.build: {script} ended with status {code}; its output is above", code=1)
    if not (out / COMPLETE).exists():
        raise UserError(f"model.build: {script} left no {COMPLETE} file in {out}", code=1)
