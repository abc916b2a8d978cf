"""The figures of docs/quickstart.md: runs a recipe locally and measures it from outside.

    .venv/bin/python tests/bench/bench_quickstart.py [recipes/quickstart.toml] [--set key=value ...]

Prints wall time, rewards, phase medians, time shares, tokens, and the peak of the proportional memory (PSS) of all
processes together, sampled once a second.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path


def children(pid: int) -> list[int]:
    """All descendants of a process."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found, todo = [], [pid]
    while todo:
        todo += (more := parents.get(todo.pop(), []))
        found += more
    return found


def pss(pid: int) -> int:
    """Proportional set size in bytes; 0 for a process that is gone."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        pass
    return 0


def watch(arguments: list[str]) -> tuple[float, int]:
    """Run `gyre submit`; wall seconds and the peak of memory."""
    began, peak = time.monotonic(), 0
    process = subprocess.Popen([str(Path(sys.executable).parent / "gyre"), "submit", *arguments, "--local"])
    while process.poll() is None:
        peak = max(peak, sum(pss(pid) for pid in [process.pid, *children(process.pid)]))
        time.sleep(1.0)
    if process.returncode != 0:
        raise SystemExit(f"gyre submit ended with {process.returncode}")
    return time.monotonic() - began, peak


def report(status: dict, wall: float, peak: int) -> None:
    steps = status["steps"]
    print(
        f"\ncommand wall time (model build included if it was not cached): {wall:.0f} s; "
        f"run: {status['updated'] - status['started']:.0f} s"
    )
    print("reward by step: " + " ".join(f"{s['reward']:.2f}" for s in steps if s["reward"] is not None))
    print("evaluation: " + ", ".join(f"{e['score']:.2f} at version {e['version']}" for e in status["evals"]))
    print(f"seconds a step, median: {statistics.median(s['seconds'] for s in steps):.1f}")
    dropped: dict[str, int] = {}
    for step in steps:
        for reason, count in step["dropped"].items():
            dropped[reason] = dropped.get(reason, 0) + count
    print(
        f"tokens of the steps: {sum(s['tokens_sampled'] for s in steps)} sampled, "
        f"{sum(s['tokens_trained'] for s in steps)} trained, dropped {dropped}"
    )
    print(
        f"largest |recomputed - recorded| log-probability at equal version: "
        f"{max(s['logprob_difference'] for s in steps):.2e}"
    )
    for to in ("training", "rollout"):
        switches = [x for cell in status["cells"] for x in cell["switches"] if x["to"] == to]
        names = list(dict.fromkeys(name for x in switches for name in x["phases"]))
        phases = ", ".join(f"{n} {statistics.median(x['phases'].get(n, 0.0) for x in switches):.2f} s" for n in names)
        total = statistics.median(x["seconds"] for x in switches) if switches else 0.0
        print(f"switches to {to}: {len(switches)}, median {total:.2f} s ({phases})")
    for cell in status["cells"]:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in cell["shares"].items() if share >= 0.005)
        print(f"{cell['name']} ({cell['kind']}): {shares}")
    print(f"peak memory of all processes together (PSS): {peak / 2**20:.0f} MiB")


def main() -> None:
    arguments = sys.argv[1:] or ["recipes/quickstart.toml"]
    wall, peak = watch(arguments)
    gyre = str(Path(sys.executable).parent / "gyre")
    done = subprocess.run([gyre, "status", "--json"], capture_output=True, text=True, check=True, env=os.environ)
    report(json.loads(done.stdout), wall, peak)


if __name__ == "__main__":
    main()
