"""Writes small terminal tasks of six kinds as Harbor task folders. Seeded, standard library only.

Owns the wording, the vocabulary and the graders of the quickstart's tasks. The warm start of the tiny model
imports this file by its path, so that what it is taught and what it is graded on have one source. Invariant:
the same seed writes the same bytes.

    python recipes/tasks/generate.py [FOLDER]      writes FOLDER/quickstart and FOLDER/held-out
"""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

WORDS = (  # noqa: SIM905
    "red blue green gold pink gray apple pear plum fig kiwi lemon cat dog fox owl bee ant "
    "sun moon star rain snow wind oak pine elm fern moss reed iron tin zinc lead ruby onyx"
).split()
OUTPUTS = ["out", "res", "ans", "sol", "fin", "end", "log", "sum"]
INPUTS = ["data", "list", "text", "names", "items", "rows"]

SEED = 20260701
SETS = {"quickstart": (72, ""), "held-out": (18, "held-out-")}
"""By folder: how many tasks (a multiple of the number of kinds), and what their names start with."""

DOCKERFILE = "FROM debian:12-slim\nWORKDIR /app\n"
TASK_TOML = """\
schema_version = "1.0"

[task]
name = "gyre/{name}"
description = "{description}"
keywords = ["files", "{kind}"]

[metadata]
difficulty = "trivial"
kind = "{kind}"

[agent]
timeout_sec = 120.0

[verifier]
timeout_sec = 30.0

[environment]
memory_mb = 512
storage_mb = 256
"""
TEST_SH = """\
#!/bin/bash
# Compares {output} with the expected text, blank lines at its end aside; uses nothing but bash.
root="${{GYRE_ROOT:-}}"
read -r -d '' expected <<'EXPECTED'
{expected}
EXPECTED
reward=0
if [[ -f {output} && ! -L {output} ]]; then
    read -r -d '' -n 65536 found <{output}
    [[ "$found" == "$expected" ]] && reward=1
fi
echo "$reward" >"$root/logs/verifier/reward.txt"
"""
SOLVE_SH = "#!/bin/bash\n{command}\n"


@dataclass(frozen=True)
class TaskSpec:
    """One task: what is asked, the files that are there, the right command, and the file that it must leave."""

    kind: str
    instruction: str
    files: dict[str, str] = field(default_factory=dict)
    """Name in the work directory -> text."""
    command: str = ""
    output: str = ""
    expected: str = ""
    """Text of `output`, blank space at both ends aside."""


@dataclass(frozen=True)
class _Material:
    source: str
    output: str
    word: str
    count: int
    lines: list[str]


def _create(m: _Material) -> TaskSpec:
    text = f"Create a file named {m.output} with the word {m.word}."
    return TaskSpec("create", text, {}, f"echo {m.word} > {m.output}", m.output, m.word)


def _count(m: _Material) -> TaskSpec:
    text = f"Count the lines of {m.source} and write the number to {m.output}."
    return _on_lines("count", m, text, f"wc -l < {m.source} > {m.output}", [str(len(m.lines))])


def _sort(m: _Material) -> TaskSpec:
    text = f"Sort the lines of {m.source} into {m.output}."
    return _on_lines("sort", m, text, f"sort {m.source} > {m.output}", sorted(m.lines))


def _upper(m: _Material) -> TaskSpec:
    text = f"Write {m.source} in upper case to {m.output}."
    upper = [line.upper() for line in m.lines]
    return _on_lines("upper", m, text, f"tr a-z A-Z < {m.source} > {m.output}", upper)


def _head(m: _Material) -> TaskSpec:
    text = f"Write the first {m.count} lines of {m.source} to {m.output}."
    return _on_lines("head", m, text, f"head -n {m.count} {m.source} > {m.output}", m.lines[: m.count])


def _uniq(m: _Material) -> TaskSpec:
    text = f"Write the sorted unique lines of {m.source} to {m.output}."
    return _on_lines("uniq", m, text, f"sort -u {m.source} > {m.output}", sorted(set(m.lines)))


def _on_lines(kind: str, m: _Material, instruction: str, command: str, expected: list[str]) -> TaskSpec:
    files = {m.source: "\n".join(m.lines) + "\n"}
    return TaskSpec(kind, instruction, files, command, m.output, "\n".join(expected))


MAKERS: dict[str, Callable[[_Material], TaskSpec]] = {
    "create": _create,
    "count": _count,
    "sort": _sort,
    "upper": _upper,
    "head": _head,
    "uniq": _uniq,
}
KINDS = tuple(MAKERS)


def generate_task(rng: random.Random, kind: str | None = None) -> TaskSpec:
    """A random task, of `kind` where it is given."""
    kind = kind or rng.choice(KINDS)
    material = _Material(
        source=rng.choice(INPUTS) + ".txt",
        output=rng.choice(OUTPUTS) + ".txt",
        word=rng.choice(WORDS),
        count=rng.randint(2, 5),
        lines=[rng.choice(WORDS) for _ in range(rng.randint(5, 9))],
    )
    return MAKERS[kind](material)


def generate_sets(seed: int = SEED) -> dict[str, list[tuple[str, TaskSpec]]]:
    """(name, task) by folder. No name or instruction occurs twice, within a folder or across folders."""
    rng = random.Random(seed)
    seen: set[str] = set()

    def fresh(kind: str) -> TaskSpec:
        while (task := generate_task(rng, kind)).instruction in seen:
            pass
        seen.add(task.instruction)
        return task

    return {
        folder: [(f"{prefix}{kind}-{number:02d}", fresh(kind)) for kind, number in _numbered(count)]
        for folder, (count, prefix) in SETS.items()
    }


def _numbered(count: int) -> Iterator[tuple[str, int]]:
    for kind in KINDS:
        for number in range(1, count // len(KINDS) + 1):
            yield kind, number


def write_task(folder: Path, task: TaskSpec) -> None:
    """Write one task as a Harbor folder."""
    copies = "".join(f"COPY {name} /app/{name}\n" for name in task.files)
    files = {
        "instruction.md": task.instruction + "\n",
        "task.toml": TASK_TOML.format(name=folder.name, kind=task.kind, description=task.instruction),
        "environment/Dockerfile": DOCKERFILE + copies,
        "tests/test.sh": TEST_SH.format(output=task.output, expected=task.expected),
        "solution/solve.sh": SOLVE_SH.format(command=task.command),
        **{f"environment/{name}": text for name, text in task.files.items()},
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
        path.chmod(0o755 if name.endswith(".sh") else 0o644)


def main(target: Path) -> None:
    for folder, tasks in generate_sets().items():
        shutil.rmtree(target / folder, ignore_errors=True)
        for name, task in tasks:
            write_task(target / folder / name, task)
        print(f"{target / folder}: {len(tasks)} tasks")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
