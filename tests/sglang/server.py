"""A real SGLang server under test: launched as a cell's lead launches it, ended by its pipe."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre.engines.launch import EngineLaunch, sglang_launch
from gyre.engines.sglang.arguments import NO_STORE, WHOLE, EnginePart, Store
from gyre.recipe.schema import Cells, Model, Recipe, Rollout, Tasks, Train
from tests.engines.place import SHAPE, VOCABULARY, Place, make_model

START_SECONDS = 400.0
"""Two shared cores; alone it takes half a minute."""


def recipe(model: str, *arguments: str, **rollout: Any) -> Recipe:
    """What a run without GPUs would say."""
    settings = {"engine": "sglang", "context": 4096, "executions_per_cell": 8, **rollout}
    return Recipe(
        name="sglang",
        model=Model(path=model, dtype="float32"),
        tasks=Tasks(path="tasks"),
        rollout=Rollout(arguments=list(arguments), **settings),
        train=Train(steps=1),
        cells=Cells(count=1, gpus_per_node=0),
    )


WEIGHTS_KEY = "of the engines of one cell"
"""The secret by which the shared servers read weights in shared memory."""


@dataclass
class Server:
    """One server process. `log` has its output."""

    process: subprocess.Popen[bytes]
    launch: EngineLaunch
    log: Path
    model: str
    url: str = ""

    def wait_ready(self) -> Server:
        deadline = time.monotonic() + START_SECONDS
        while not self.launch.port_file.exists():
            assert self.process.poll() is None, f"SGLang ended with {self.process.returncode}:\n{self.tail()}"
            assert time.monotonic() < deadline, f"SGLang did not start:\n{self.tail()}"
            time.sleep(0.1)
        self.url = f"http://127.0.0.1:{int(self.launch.port_file.read_text())}"
        return self

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])

    @property
    def place(self) -> Place:
        keys = json.loads(self.launch.key_file.read_text())
        return Place(self.url, keys["api_key"], keys["admin_key"], self.model, VOCABULARY, real=True)

    def stop(self) -> None:
        """Its pipe closes; then whatever is left of its session goes."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()


def launch(
    folder: Path,
    model: str,
    *arguments: str,
    environment: dict[str, str] | None = None,
    part: EnginePart = WHOLE,
    store: Store = NO_STORE,
    weights_key: str = "",
    **rollout: Any,
) -> Server:
    """Start a server and return at once; several may start side by side."""
    folder.mkdir(parents=True, exist_ok=True)
    told: dict[str, Any] = {"part": part, "store": store, "weights_key": weights_key}
    words = sglang_launch(recipe(model, *arguments, **rollout), Path(model), folder, "engine", **told)
    log = folder / "engine.log"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            words.argv,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env={**os.environ, **words.env, **(environment or {})},
            start_new_session=True,
        )
    return Server(process, words, log, model)


def make_served_model(folder: Path, seed: int) -> str:
    """The engine tests' random model, with a tokenizer."""
    model = make_model(folder, seed)
    add_tokenizer(folder)
    return model


def make_moe_model(folder: Path, seed: int) -> str:
    """A random two-layer Qwen3-MoE of four experts, two a token, with a tokenizer."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **SHAPE,
        moe_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    add_tokenizer(folder)
    return str(folder)


def add_tokenizer(folder: Path) -> None:
    """What a server wants besides weights: a byte a token, then names."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, *(f"<{index}>" for index in range(VOCABULARY - len(alphabet)))]
    tokenizer = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
