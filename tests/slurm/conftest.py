"""A real Slurm on this machine for the whole session; each test leaves it idle."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, Submitted
from tests.tasks import graded_at_random


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    if os.geteuid() != 0:
        pytest.skip("the test cluster needs root (namespaces, devices, daemons)")
    root = Path(tempfile.mkdtemp(prefix="gs-", dir="/tmp"))  # short: unix sockets lie below it
    made = Cluster(root)
    try:
        made.call("install")
    except RuntimeError as error:
        shutil.rmtree(root)
        pytest.skip(f"Slurm cannot be installed here (install slurm-wlm): {error}")
    try:
        made.call("start")
        yield made
    finally:
        made.call("stop")


@pytest.fixture
def submitted(cluster: Cluster, tmp_path: Path, cache: Path) -> Iterator[Callable[..., Submitted]]:
    """Prepares runs (`.submit()` submits one); afterwards nothing runs, and every node is up."""
    count = 0
    tasks = graded_at_random(tmp_path / "tasks")

    def make(*settings: str) -> Submitted:
        nonlocal count
        count += 1
        home = tmp_path / f"runs-{count}"
        home.mkdir()
        return Submitted(cluster, home, cache, tasks, *settings)

    yield make
    cluster.heal()
