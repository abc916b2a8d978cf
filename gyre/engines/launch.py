"""Launching an engine: its command line, its keys, and finding out where it answers.

Owns how a server is started; the cell's lead owns the process. Invariant: keys are random and only ever in a 0600 file.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path

from gyre.engines.sglang.arguments import (
    NO_SEED,
    NO_STORE,
    WHOLE,
    EnginePart,
    Seed,
    Store,
    server_arguments,
    server_environment,
    visible_gpus,
)
from gyre.engines.sglang.install import HERE, interpreter
from gyre.recipe.schema import Recipe


@dataclass(frozen=True)
class EngineLaunch:
    """argv and environment of a server; it writes the port it listens on to `port_file`."""

    argv: list[str]
    env: dict[str, str]
    port_file: Path
    key_file: Path


def write_keys(path: Path, weights_key: str = "") -> dict[str, str]:
    """Fresh random keys, readable by the owner alone. `weights_key`: the secret by which an engine's ranks are given
    weights in shared memory, one for all engines that read the same; theirs is the admin key when there is none."""
    keys = {"api_key": secrets.token_urlsafe(24), "admin_key": secrets.token_urlsafe(24)}
    keys |= {"weights_key": weights_key} if weights_key else {}
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "w") as file:
        json.dump(keys, file)
    return keys


def forget_keys(folder: Path, name: str) -> None:
    """Remove the key and port files of the earlier starts of the engine, or part of one, `name`."""
    for old in folder.glob(f"{name}.*"):
        old.unlink(missing_ok=True)


def engine_launch(
    recipe: Recipe,
    model: Path,
    folder: Path,
    name: str,
    host: str = "127.0.0.1",
    store: Store = NO_STORE,
    part: EnginePart = WHOLE,
    seed: Seed = NO_SEED,
    weights_key: str = "",
) -> EngineLaunch:
    """The recipe's engine on `host`, on a port of its own choice; its key and port files lie in `folder`.

    Raises UserError when SGLang is not installed.
    """
    if recipe.rollout.engine == "reference":
        return reference_launch(recipe, model, folder, name, host)
    return sglang_launch(recipe, model, folder, name, host, part, store, seed, weights_key)


def sglang_launch(
    recipe: Recipe,
    model: Path,
    folder: Path,
    name: str,
    host: str = "127.0.0.1",
    part: EnginePart = WHOLE,
    store: Store = NO_STORE,
    seed: Seed = NO_SEED,
    weights_key: str = "",
) -> EngineLaunch:
    """SGLang's server, in an environment of its own: the recipe's, or the installed one."""
    port_file, key_file = folder / f"{name}.port", folder / name
    port_file.unlink(missing_ok=True)
    write_keys(key_file, weights_key)
    python = recipe.rollout.python or str(interpreter())
    program = [python, str(HERE / "inside" / "serve.py"), "--port-file", str(port_file), "--key-file", str(key_file)]
    if seed.url:
        program += ["--seed-keys", str(seed.keys)]
    words = server_arguments(recipe, model, host, part, store, seed)
    environment = server_environment(recipe, host) | visible_gpus(part.gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return EngineLaunch([*program, "--", *words], environment, port_file, key_file)


def reference_launch(recipe: Recipe, model: Path, folder: Path, name: str, host: str = "127.0.0.1") -> EngineLaunch:
    """The reference engine on `host`, on a port of its own choice."""
    port_file, key_file = folder / f"{name}.port", folder / name
    port_file.unlink(missing_ok=True)
    write_keys(key_file)
    argv = [
        sys.executable,
        "-m",
        "gyre.engines.reference",
        "--model",
        str(model),
        "--host",
        host,
        "--port",
        "0",
        "--port-file",
        str(port_file),
        "--key-file",
        str(key_file),
        "--context-length",
        str(recipe.rollout.context),
        "--exit-on-eof",
        *recipe.rollout.arguments,
    ]
    return EngineLaunch(argv, {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}, port_file, key_file)
