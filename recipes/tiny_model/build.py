"""Builds the quickstart's model: a Hugging Face folder with a tiny Qwen3 that has seen demonstrations of the tasks.

    python recipes/tiny_model/build.py --out DIR --seed 1 [--steps N] [--untrained]

Invariant: DIR exists only whole (built aside, then renamed) and holds a COMPLETE file with its key; the same key, from
`cache_key`, means the same weights on one machine. Nothing heavy is imported before it is needed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

HERE = Path(__file__).resolve().parent
SOURCES = ["recipes/tasks/generate.py", "gyre/executions/harnesses/shell_prompt.py"]
"""What the model is built from, besides this folder's own files."""
COMPLETE = "COMPLETE"
STEPS = 520
TOKENIZER_TEXTS = 2000

Progress = Callable[[int, int, str], None]
"""Called with (steps done, steps in all, what is going on)."""


def cache_key(seed: int, steps: int = STEPS) -> str:
    """Names the model that `build` makes: 16 hex digits over the sources, `seed` and `steps`."""
    files = sorted([*HERE.glob("*.py"), *HERE.glob("*.jinja"), *(ROOT / name for name in SOURCES)])
    digest = hashlib.sha256(f"seed {seed} steps {steps}\n".encode())
    for file in files:
        data = file.read_bytes()
        digest.update(f"{file.name} {len(data)}\n".encode() + data)
    return digest.hexdigest()[:16]


def build(out: Path, seed: int, progress: Progress = lambda done, total, what: None, *, steps: int = STEPS) -> None:
    """Build the model into the folder `out`, or leave it if it is there already. With `steps` 0 it stays random.

    Raises FileExistsError when `out` holds something else.
    """
    key = cache_key(seed, steps)
    marker = out / COMPLETE
    if marker.is_file() and marker.read_text().strip() == key:
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} is there already and is not this model: remove it or choose another --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        fill(aside, seed, steps, progress)
        (aside / COMPLETE).write_text(key + "\n")
        publish(aside, out, key)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def publish(aside: Path, out: Path, key: str) -> None:
    """Rename the finished folder into place; a builder that was faster with the same model wins."""
    aside.chmod(0o755)
    for file in aside.iterdir():
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
    try:
        aside.rename(out)
    except OSError:
        marker = out / COMPLETE
        if not marker.is_file() or marker.read_text().strip() != key:
            raise


def fill(folder: Path, seed: int, steps: int, progress: Progress) -> None:
    """Write every file of the model into `folder`. Uses one torch thread: two collapse when the machine is shared."""
    progress(0, steps, "loading torch and transformers")
    import torch
    import transformers

    from recipes.tiny_model import conversation, demonstrations, vocabulary, warmup

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        progress(0, steps, "tokenizer")
        rng = random.Random(f"tokenizer {seed}")
        texts = (conversation.render(demonstrations.demonstration(rng, True)) for _ in range(TOKENIZER_TEXTS))
        tokenizer = vocabulary.train_tokenizer(texts)
        model = warmup.new_model(tokenizer, seed)
        warmup.warm_start(model, tokenizer, warmup.Plan(steps=steps), seed, progress)
    finally:
        torch.set_num_threads(threads)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", vocabulary.tokenizer_config())
    stop = [vocabulary.token_id(tokenizer, text) for text in (conversation.END, vocabulary.PADDING)]
    write_json(folder / "generation_config.json", {"eos_token_id": stop, "pad_token_id": stop[1], "do_sample": True})
    shutil.copyfile(conversation.TEMPLATE, folder / "chat_template.jinja")


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def plain_progress(done: int, total: int, what: str) -> None:
    """A line for every tenth of the way."""
    if done == 0 or done == total or done * 10 // total > (done - 1) * 10 // total:
        print(f"tiny model: {done}/{total} {what}", flush=True)


def build_with_bar(out: Path, seed: int, steps: int) -> None:
    """Build with a progress bar on a terminal and plain lines otherwise."""
    if not sys.stdout.isatty():
        build(out, seed, plain_progress, steps=steps)
        return
    from rich import progress as rich_progress

    columns = (
        rich_progress.TextColumn("tiny model"),
        rich_progress.BarColumn(),
        rich_progress.TextColumn("{task.description}"),
        rich_progress.TimeRemainingColumn(),
    )
    with rich_progress.Progress(*columns) as bar:
        task = bar.add_task("", total=steps)
        build(
            out,
            seed,
            lambda done, total, what: bar.update(task, completed=done, description=what),
            steps=steps,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the quickstart's tiny model into a Hugging Face folder.")
    parser.add_argument("--out", type=Path, help="folder to write; must be new or empty")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=STEPS, help="warm-start steps")
    parser.add_argument("--untrained", action="store_true", help="random weights, in seconds")
    parser.add_argument("--key", action="store_true", help="only print the cache key of this model")
    arguments = parser.parse_args()
    steps = 0 if arguments.untrained else arguments.steps
    if arguments.key:
        print(cache_key(arguments.seed, steps))
        return 0
    if arguments.out is None:
        parser.error("--out is missing")
    try:
        build_with_bar(arguments.out, arguments.seed, steps)
    except FileExistsError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
