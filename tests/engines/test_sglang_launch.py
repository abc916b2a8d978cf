"""How SGLang is installed and launched: its command line, its keys, its environment. No server runs here."""

from __future__ import annotations

import json
import socket
import stat
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from gyre.engines.launch import sglang_launch
from gyre.engines.sglang import install as installer
from gyre.engines.sglang.arguments import (
    WRITABLE,
    EnginePart,
    Store,
    server_arguments,
    server_environment,
    visible_gpus,
)
from gyre.engines.sglang.install import COMPLETE, environment, install, interpreter
from gyre.engines.sglang.store import free_port, master_arguments
from gyre.errors import UserError
from gyre.recipe.load import load_recipe
from gyre.recipe.schema import Cells, Model, Recipe, Rollout, Tasks, Train, Trajectory


def recipe(gpus: int, **rollout: object) -> Recipe:
    return Recipe(
        name="r",
        model=Model(path="/m", dtype="bfloat16"),
        tasks=Tasks(path="t"),
        rollout=Rollout(engine="sglang", context=1024, executions_per_cell=4, **rollout),  # type: ignore[arg-type]
        train=Train(steps=1),
        cells=Cells(gpus_per_node=gpus),
    )


def pairs(words: list[str]) -> dict[str, str]:
    """Flags with the word that follows."""
    return {word: after for word, after in zip(words, [*words[1:], ""], strict=True) if word.startswith("--")}


def test_a_server_on_gpus() -> None:
    asked = recipe(8, tensor_parallel=8, data_parallel=2, expert_parallel=4, memory_fraction=0.8, arguments=["--x"])
    words = server_arguments(asked, Path("/m"), "10.0.0.7")
    found = pairs(words)
    assert (found["--tp-size"], found["--dp-size"], found["--ep-size"]) == ("8", "2", "4")
    assert (found["--context-length"], found["--dtype"], found["--mem-fraction-static"]) == ("1024", "bfloat16", "0.8")
    assert {"--enable-dp-attention", "--enable-memory-saver"} <= set(found)
    assert "--device" not in found
    assert words[-1] == "--x", "the user's own arguments win: they come last"
    environment = server_environment(asked, "10.0.0.7")
    assert environment["SGLANG_HOST_IP"] == "10.0.0.7"
    assert "SGLANG_USE_CPU_ENGINE" not in environment


def test_routing_is_returned_where_it_is_recorded() -> None:
    asked = recipe(8)
    recorded = msgspec.structs.replace(asked, trajectory=Trajectory(record=["routing"]))
    flag = "--enable-return-routed-experts"
    assert flag not in server_arguments(asked, Path("/m"), "h")
    assert flag in server_arguments(recorded, Path("/m"), "h")


def test_a_server_whose_memory_is_written() -> None:
    """By the protocol that the trainer's own sessions speak, on GPUs too."""
    asked = recipe(8, weights="mooncake")
    assert WRITABLE in server_arguments(asked, Path("/m"), "10.0.0.7")
    assert server_environment(asked, "10.0.0.7")["MOONCAKE_PROTOCOL"] == "tcp"
    assert WRITABLE not in server_arguments(recipe(8), Path("/m"), "10.0.0.7")


def test_a_server_on_cpu_is_bounded() -> None:
    found = pairs(server_arguments(recipe(0), Path("/m"), "127.0.0.1"))
    assert (found["--device"], found["--attention-backend"]) == ("cpu", "torch_native")
    assert (found["--max-running-requests"], found["--max-total-tokens"]) == ("4", "4096")
    assert "--enable-memory-saver" not in found
    assert server_environment(recipe(0), "127.0.0.1")["SGLANG_USE_CPU_ENGINE"] == "1"
    assert server_environment(recipe(0, tensor_parallel=2), "h")["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1"


def test_a_server_that_joins_a_store() -> None:
    store = Store("10.0.0.1:5000", "run-7")
    found = pairs(server_arguments(recipe(8, store_mb=64), Path("/m"), "10.0.0.7", store=store))
    assert (found["--hicache-storage-backend"], found["--page-size"]) == ("mooncake", "16")
    about = json.loads(found["--hicache-storage-backend-extra-config"])
    assert (about["master_server_address"], about["extra_backend_tag"]) == ("10.0.0.1:5000", "run-7")
    assert (about["local_hostname"], about["protocol"], about["global_segment_size"]) == ("10.0.0.7", "rdma", 64 << 20)
    on_cpu = pairs(server_arguments(recipe(0, store_mb=64), Path("/m"), "127.0.0.1", store=store))
    assert json.loads(on_cpu["--hicache-storage-backend-extra-config"])["protocol"] == "tcp"
    assert "--enable-hierarchical-cache" not in server_arguments(recipe(8), Path("/m"), "10.0.0.7")


def test_the_stores_master_listens_on_its_nodes_address_alone() -> None:
    words = master_arguments("10.0.0.1", 5000, 5001)
    assert {"--rpc_address=10.0.0.1", "--rpc_port=5000", "--metrics_host=10.0.0.1", "--metrics_port=5001"} <= set(words)
    assert Path(words[0]).exists()


def test_a_port_is_kept_if_it_is_free() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert free_port("127.0.0.1", port) not in (0, port)
    assert free_port("127.0.0.1", port) == port


def test_one_engine_on_two_nodes() -> None:
    part = EnginePart(nodes=2, node=1, rendezvous="10.0.0.7:5000")
    found = pairs(server_arguments(recipe(8, tensor_parallel=16), Path("/m"), "10.0.0.8", part))
    assert (found["--nnodes"], found["--node-rank"], found["--dist-init-addr"]) == ("2", "1", "10.0.0.7:5000")
    assert "--nnodes" not in pairs(server_arguments(recipe(8), Path("/m"), "10.0.0.8"))


def test_engines_of_a_node_see_their_own_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert visible_gpus(range(0), "0,1") == {}
    assert visible_gpus(range(2, 4), None) == {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert visible_gpus(range(2, 4), "GPU-a,GPU-b,GPU-c,GPU-d") == {"CUDA_VISIBLE_DEVICES": "GPU-c,GPU-d"}
    with pytest.raises(UserError, match=r"cells.gpus_per_node: an engine is to have GPUs 2-3 .* has 3"):
        visible_gpus(range(2, 4), "4,5,6")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    asked, part = recipe(4, python="/python", tensor_parallel=2), EnginePart(gpus=range(2, 4))
    launch = sglang_launch(asked, Path("/m"), tmp_path, "e", part=part, weights_key="shared by a cell's engines")
    assert launch.env["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert "--nnodes" not in launch.argv
    assert json.loads(launch.key_file.read_text())["weights_key"] == "shared by a cell's engines"


def test_keys_are_random_private_and_on_no_command_line(tmp_path: Path) -> None:
    launches = [sglang_launch(recipe(0, python="/env/bin/python"), Path("/m"), tmp_path, f"e{i}") for i in range(2)]
    keys = [json.loads(launch.key_file.read_text()) for launch in launches]
    assert len({key for one in keys for key in one.values()}) == 4
    for launch, own in zip(launches, keys, strict=True):
        assert stat.S_IMODE(launch.key_file.stat().st_mode) == 0o600
        told = " ".join([*launch.argv, *launch.env, *launch.env.values()])
        assert not any(key in told for key in own.values())
        assert launch.argv[0] == "/env/bin/python"


class Pip:
    """Stands for venv and pip: makes what they make, or fails at one command."""

    def __init__(self, folder: Path, fail_at: int = -1) -> None:
        self.folder, self.fail_at = folder, fail_at
        self.commands: list[list[str]] = []

    def __call__(self, words: Sequence[str]) -> None:
        assert not (self.folder / COMPLETE).exists()
        self.commands.append(list(words))
        if len(self.commands) - 1 == self.fail_at:
            raise UserError("no network", code=1)
        (self.folder / "lib" / "python3.11" / "site-packages").mkdir(parents=True, exist_ok=True)


def test_an_environment_is_built_once(tmp_path: Path) -> None:
    pip, lines = Pip(environment(tmp_path)), []  # type: ignore[var-annotated]
    python = install(lines.append, tmp_path, pip)
    assert python == interpreter(tmp_path) == environment(tmp_path) / "bin" / "python"
    assert len(lines) == 3
    assert pip.commands[1][-1] == "torch==2.13.0"
    assert "--no-deps" in pip.commands[2]
    install(lines.append, tmp_path, pip)
    assert (len(lines), len(pip.commands)) == (3, 3)


def test_the_shim_follows_gyre_into_a_complete_environment(tmp_path: Path) -> None:
    install(lambda _: None, tmp_path, Pip(environment(tmp_path)))
    packages = environment(tmp_path) / "lib" / "python3.11" / "site-packages"
    plugin = packages / "gyre_sglang_cpu.py"
    plugin.write_text("old")
    install(lambda _: None, tmp_path, Pip(environment(tmp_path)))
    assert plugin.read_bytes() == (installer.SHIM / "gyre_sglang_cpu.py").read_bytes()
    assert (packages / "sgl_kernel" / "__init__.py").exists()
    points = (packages / "gyre_sglang_cpu-1.dist-info" / "entry_points.txt").read_text()
    assert points.startswith("[sglang.srt.plugins]\n")


def test_half_an_environment_does_not_count(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no network"):
        install(lambda _: None, tmp_path, Pip(environment(tmp_path), fail_at=2))
    with pytest.raises(UserError, match="gyre engine install sglang"):
        interpreter(tmp_path)
    left = environment(tmp_path) / "lib" / "left-over"
    left.touch()
    install(lambda _: None, tmp_path, Pip(environment(tmp_path)))
    assert not left.exists(), "what was interrupted is built from nothing"


def test_the_list_pins_every_package() -> None:
    lines = [line for line in installer.REQUIREMENTS.read_text().splitlines() if not line.startswith("#")]
    assert f"sglang=={installer.VERSION}" in lines
    assert all(line.count("==") == 1 for line in lines)
    assert len({line.partition("==")[0].lower() for line in lines}) == len(lines)


def test_quickstart_sglang_is_the_quickstart_with_another_engine() -> None:
    root = Path(__file__).resolve().parents[2] / "recipes"
    ours, other = (load_recipe(root / name, []) for name in ("quickstart-sglang.toml", "quickstart.toml"))
    changed = {name for name in Recipe.__struct_fields__ if getattr(ours, name) != getattr(other, name)}
    assert changed <= {"name", "rollout", "train", "schedule", "eval", "group"}
    assert ours.rollout.engine == "sglang"
    assert msgspec.structs.replace(ours.rollout, engine="reference").temperature == other.rollout.temperature
