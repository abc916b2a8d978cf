"""From a recipe to the arguments of SGLang's server. Pure.

Invariant: no key is ever among them; the user's own `rollout.arguments` come last, so that they win.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from gyre.errors import UserError
from gyre.recipe.schema import Recipe

CPU_KV_TOKENS = 1 << 18
"""Most tokens of KV without GPUs, where nothing else bounds them: a share of the host's memory would be too much."""


@dataclass(frozen=True)
class EnginePart:
    """Which node of an engine this is, and its GPUs there (empty: all that there are). Several nodes find each other at
    `rendezvous`, host:port of the first."""

    nodes: int = 1
    node: int = 0
    rendezvous: str = ""
    gpus: range = range(0)


WHOLE = EnginePart()
"""All of an engine, on one node that is all its own."""


@dataclass(frozen=True)
class Store:
    """The store of KV pages that an engine joins: its master's host:port, and the name that keeps runs apart."""

    master: str = ""
    namespace: str = ""


NO_STORE = Store()
"""The engine's own prefix cache only."""
WRITABLE = "--remote-instance-weight-loader-start-seed-via-transfer-engine"
"""Ranks register their weights with a Transfer Engine of their own, and tell where those lie."""


@dataclass(frozen=True)
class Seed:
    """A running engine whose weights another takes over when it starts: where it is, its key file, and the version that
    those weights have."""

    url: str = ""
    keys: Path = Path()
    version: str = ""


NO_SEED = Seed()
"""Weights are loaded from the model's folder."""
STORE_PAGE = 16
"""Tokens of a page: what is read again at a switch is less than one."""
STORE_WORTH = 64
"""Tokens that must be found in the store before an engine takes them from there."""


def server_arguments(
    recipe: Recipe, model: Path, host: str, part: EnginePart = WHOLE, store: Store = NO_STORE, seed: Seed = NO_SEED
) -> list[str]:
    """Arguments of `sglang.launch_server`, but for the port and the keys."""
    rollout = recipe.rollout
    words = ["--model-path", str(model), "--host", host, "--dtype", recipe.model.dtype]
    words += ["--context-length", str(rollout.context), "--tp-size", str(rollout.tensor_parallel)]
    if rollout.data_parallel > 1:
        # Plain data parallelism would refuse weights by tensors; a cell has several engines instead.
        words += ["--dp-size", str(rollout.data_parallel), "--enable-dp-attention"]
    if rollout.expert_parallel > 1:
        words += ["--ep-size", str(rollout.expert_parallel)]
    if "routing" in recipe.trajectory.record:
        words.append("--enable-return-routed-experts")
    if part.nodes > 1:
        words += ["--nnodes", str(part.nodes), "--node-rank", str(part.node), "--dist-init-addr", part.rendezvous]
    if rollout.memory_fraction:
        words += ["--mem-fraction-static", str(rollout.memory_fraction)]
    words += _on_cpu(recipe) if recipe.cells.gpus_per_node == 0 else ["--enable-memory-saver"]
    if rollout.weights == "mooncake":
        words.append(WRITABLE)
    if seed.url:
        words += _from_seed(seed)
    if store.master:
        words += _with_store(recipe, host, store)
    return [*words, *rollout.arguments]


def _on_cpu(recipe: Recipe) -> list[str]:
    """What a server without GPUs needs: the only attention there is, and bounds for what a GPU's memory would bound."""
    rollout = recipe.rollout
    tokens = min(CPU_KV_TOKENS, rollout.executions_per_cell * rollout.context)
    # an idle scheduler would spin: that is a core, of few
    words = ["--device", "cpu", "--attention-backend", "torch_native", "--disable-cuda-graph", "--sleep-on-idle"]
    words += ["--max-running-requests", str(rollout.executions_per_cell), "--max-total-tokens", str(tokens)]
    if not rollout.memory_fraction:
        # A share of what is free before and after the weights were loaded: with a small one, others' use of the
        # memory in between can leave nothing.
        words += ["--mem-fraction-static", "0.3"]
    return words


def _from_seed(seed: Seed) -> list[str]:
    """Each rank reads the parameters of the same rank of the running engine, by Transfer Engine."""
    where = urlsplit(seed.url)
    option = "--remote-instance-weight-loader-"
    words = ["--load-format", "remote_instance", f"{option}backend", "transfer_engine"]
    return [
        *words,
        f"{option}seed-instance-ip",
        str(where.hostname),
        f"{option}seed-instance-service-port",
        str(where.port),
    ]


def _with_store(recipe: Recipe, host: str, store: Store) -> list[str]:
    """SGLang's hierarchical cache: pages go to the host and to the store as soon as they are read, and a call waits
    for those of its prefix."""
    about = {
        "master_server_address": store.master,
        "metadata_server": "P2PHANDSHAKE",
        "local_hostname": host,
        "protocol": "tcp" if recipe.cells.gpus_per_node == 0 else "rdma",
        "global_segment_size": recipe.rollout.store_mb << 20,
        "extra_backend_tag": store.namespace,
        "prefetch_threshold": STORE_WORTH,
    }
    # the ratio is SGLang's own default, which unsaid is refused where less than 10 GiB of the host are free
    words = ["--enable-hierarchical-cache", "--hicache-ratio", "2", "--hicache-storage-backend", "mooncake"]
    words += ["--hicache-storage-backend-extra-config", json.dumps(about), "--page-size", str(STORE_PAGE)]
    words += ["--hicache-io-backend", "direct", "--hicache-mem-layout", "page_first_direct"]
    return [*words, "--hicache-write-policy", "write_through", "--hicache-storage-prefetch-policy", "wait_complete"]


def server_environment(recipe: Recipe, host: str) -> dict[str, str]:
    """Environment of the server's process, over the lead's own."""
    # /health answers by itself: a token generated for it would find memory released, or wait through a pause
    quiet = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0", "PYTHONPATH": ""}
    words = {"HF_HUB_OFFLINE": "1", "SGLANG_HOST_IP": host, **quiet}
    if recipe.rollout.weights == "mooncake":
        words |= {"MOONCAKE_PROTOCOL": "tcp", "MC_FORCE_TCP": "1", "MC_LOG_LEVEL": "ERROR"}  # as the trainer's own
    if recipe.cells.gpus_per_node == 0:
        words |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "MC_FORCE_TCP": "1", "MC_LOG_LEVEL": "ERROR"}
        if recipe.rollout.tensor_parallel > 1:
            # One core for each rank; without it SGLang wants a NUMA node for each.
            cores = "|".join(str(rank) for rank in range(recipe.rollout.tensor_parallel))
            words["SGLANG_CPU_OMP_THREADS_BIND"] = cores
    return words


def visible_gpus(gpus: range, visible: str | None) -> dict[str, str]:
    """Environment in which a server sees these GPUs of its node and no others; `visible`: CUDA_VISIBLE_DEVICES of its
    parent, whose GPUs are counted from 0. Raises UserError when there are fewer."""
    if not gpus:
        return {}
    names = visible.split(",") if visible else [str(gpu) for gpu in range(gpus.stop)]
    if len(names) < gpus.stop:
        raise UserError(
            f"cells.gpus_per_node: an engine is to have GPUs {gpus[0]}-{gpus[-1]} of its node, but CUDA_VISIBLE_DEVICES"
            f" has {len(names)}: lower it, or ask Slurm for more"
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[gpu] for gpu in gpus)}
