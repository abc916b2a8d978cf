"""The rules of the house that a machine can hold: which room may import which, what stays pure, sizes, docstrings."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "gyre").rglob("*.py"))

LAYERS = (
    {"errors"},
    {"recipe"},
    {"ledger"},
    {"scheduling", "trajectory", "objective"},
    {"proxy", "engines", "executions", "training", "transfer"},
    {"processes"},
    {"views", "launch", "simulate"},
    {"cli"},
)
"""From the bottom up: a room imports from lower layers and from itself; neighbours only where listed."""

NEIGHBOURS = {
    ("proxy", "engines"): "the client that samples, and its value types",
    ("launch", "views"): "a run in the foreground shows its progress",
    ("simulate", "launch"): "an emulated run is launched as a real one is",
    ("simulate", "views"): "a run is opened for reading to be simulated in other modes",
}

PURE = (
    "recipe",
    "ledger/events.py",
    "ledger/event_base.py",
    "ledger/cell_events.py",
    "ledger/state.py",
    "ledger/fold.py",
    "scheduling",
    "trajectory",
)
IMPURE_MODULES = {"torch", "asyncio", "socket", "aiohttp", "time", "subprocess", "threading", "megatron", "requests"}


def level(room: str) -> int:
    return next(index for index, rooms in enumerate(LAYERS) if room in rooms)


def imports(path: Path) -> set[str]:
    """Modules that a file imports anywhere, also inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
    return found


def room_of(path: Path) -> str:
    inside = path.relative_to(ROOT / "gyre")
    return inside.parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    room = room_of(path)
    if room in ("__init__", "py.typed"):
        return
    for module in imports(path):
        if not module.startswith("gyre."):
            continue
        other = module.split(".")[1]
        if other == room or (room, other) in NEIGHBOURS:
            continue
        assert level(other) < level(room), f"{path.relative_to(ROOT)} imports {module}"


@pytest.mark.parametrize("place", PURE)
def test_pure_rooms_know_no_torch_no_network_and_no_clock(place: str) -> None:
    path = ROOT / "gyre" / place
    for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
        roots = {module.split(".")[0] for module in imports(file)}
        assert not roots & IMPURE_MODULES, f"{file.relative_to(ROOT)}: {roots & IMPURE_MODULES}"


def test_objective_is_torch_only() -> None:
    for file in (ROOT / "gyre" / "objective").rglob("*.py"):
        roots = {module.split(".")[0] for module in imports(file)}
        assert not roots & {"megatron", "aiohttp", "asyncio", "pyarrow"}, file


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_module_opens_with_what_it_owns_and_is_short(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 500
    assert ast.get_docstring(ast.parse(text))


def test_functions_fit_a_screen() -> None:
    long = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                if node.end_lineno - node.lineno > 80:
                    long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert not long


def test_the_command_line_loads_nothing_heavy() -> None:
    code = (
        "import sys, gyre.cli.main, gyre.cli.status_, gyre.cli.list_, gyre.cli.submit_, gyre.views.runs\n"
        "heavy = {'torch', 'transformers', 'megatron', 'pyarrow', 'zarr', 'aiohttp', 'numpy'} & set(sys.modules)\n"
        "print(sorted(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
