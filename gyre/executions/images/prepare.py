"""Unpacks the images of a set of tasks before a run needs them: each once, several side by side.

Owns `prepare_images`, behind `gyre tasks prepare`. Invariant: a fault of one image is told with the tasks that lie on
it, and keeps no other from being prepared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from msgspec import Struct

from gyre.errors import UserError
from gyre.executions.images.store import Image, Images, is_unpacked, unpacked
from gyre.executions.tasks import load_task, task_folders


class Prepared(Struct, frozen=True, kw_only=True):
    """One image (`image` is its path, "" the host's own system), or tasks that have none: then `problem` says why."""

    image: str
    tasks: tuple[str, ...]
    root: str = ""
    """Its root file system."""
    built: bool = False
    """It was unpacked now, and not found."""
    seconds: float = 0.0
    problem: str = ""


def prepare_images(
    path: Path,
    images: Images,
    cache: Path | None = None,
    parallel: int = 4,
    host_env: Mapping[str, str] | None = None,
    done: Callable[[Prepared], None] = lambda prepared: None,
) -> list[Prepared]:
    """Prepare the images of all tasks below `path`; `done` is called as each one is ready, in some order.

    The result is sorted by image. Raises UserError when there are no tasks.
    """
    lying_on: dict[Image | None, list[str]] = {}
    results: list[Prepared] = []
    for folder in task_folders(path):
        try:
            for image in load_task(folder, host_env, images).images:
                lying_on.setdefault(image, []).append(folder.name)
        except UserError as error:
            results.append(Prepared(image="", tasks=(folder.name,), problem=str(error)))
            done(results[-1])

    found = {image: tuple(names) for image, names in lying_on.items()}
    results += unpack_all(found, cache, parallel, done)
    return sorted(results, key=lambda prepared: (prepared.image, prepared.tasks))


def unpack_all(
    images: Mapping[Image | None, tuple[str, ...]],
    cache: Path | None = None,
    parallel: int = 4,
    done: Callable[[Prepared], None] = lambda prepared: None,
) -> list[Prepared]:
    """Unpack these images, each with the names of its tasks."""

    def one(image: Image | None) -> Prepared:
        prepared = _prepare(image, images[image], cache)
        done(prepared)
        return prepared

    with ThreadPoolExecutor(max_workers=parallel) as pool:
        return list(pool.map(one, images))


def _prepare(image: Image | None, tasks: tuple[str, ...], cache: Path | None) -> Prepared:
    if image is None:
        return Prepared(image="", tasks=tasks)
    started = time.perf_counter()
    try:
        there = is_unpacked(image, cache)
        root = unpacked(image, cache)
    except UserError as error:
        return Prepared(image=str(image.path), tasks=tasks, problem=str(error))
    seconds = time.perf_counter() - started
    return Prepared(image=str(image.path), tasks=tasks, root=str(root), built=not there, seconds=seconds)
