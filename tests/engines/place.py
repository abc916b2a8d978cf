"""A tiny random Qwen3, a reference engine process on it, and transformers as the oracle."""

from __future__ import annotations

import asyncio
import json
import select
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import numpy as np

from gyre.engines.client import EngineClient

VOCABULARY = 600
T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """Where an engine is, and what opens it."""

    url: str
    api_key: str | None
    admin_key: str | None
    model: str
    vocabulary: int
    real: bool = False

    def client(self, session: aiohttp.ClientSession) -> EngineClient:
        return EngineClient(self.url, session, self.api_key, self.admin_key, self.vocabulary)

    def drive(self, work: Callable[[EngineClient], Awaitable[T]]) -> T:
        """Run `work` with a client in an event loop of its own."""

        async def body() -> T:
            async with aiohttp.ClientSession() as session:
                async with asyncio.timeout(600 if self.real else 60):
                    return await work(self.client(session))

        return asyncio.run(body())


SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 160,
    "max_position_embeddings": 4096,
    "initializer_range": 0.08,
}
"""Of random models: two layers, sharp enough that log-probabilities mean something."""


def make_model(folder: Path, seed: int) -> str:
    """A random Qwen3 of 600 tokens."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**SHAPE, tie_word_embeddings=True)
    torch.manual_seed(seed)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return str(folder)


def write_keys(path: Path, keys: dict[str, str], mode: int = 0o600) -> Path:
    path.touch(mode=mode)
    path.write_text(json.dumps(keys))
    path.chmod(mode)
    return path


def start_engine(folder: Path, model: str, *extra: str) -> tuple[subprocess.Popen[bytes], str]:
    """Start a reference engine that ends with our pipe; wait for its address."""
    keys = write_keys(folder / "keys.json", {"api_key": "api", "admin_key": "admin"})
    command = [sys.executable, "-m", "gyre.engines.reference", "--model", model, "--exit-on-eof"]
    command += ["--port-file", str(folder / "port"), "--key-file", str(keys), *extra]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], 120)[0], "the engine did not start"
    assert b"serving" in process.stdout.readline()
    return process, f"http://127.0.0.1:{int((folder / 'port').read_text())}"


def stop_engine(process: subprocess.Popen[bytes]) -> int:
    """Close its pipe and wait for its end."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    try:
        return process.wait(timeout=30)
    finally:
        process.kill()
        process.stdout.close()


class Oracle:
    """transformers, one sequence at a time, no cache."""

    def __init__(self, model: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self.net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def logits(self, ids: list[int]) -> Any:
        """[tokens, vocabulary]."""
        import torch

        with torch.inference_mode():
            return self.net(input_ids=torch.tensor([ids]), use_cache=False).logits[0]

    def logprobs(self, prompt: list[int], output: list[int], temperature: float = 1.0) -> list[float]:
        """Log-probability of each output token."""
        import torch

        logits = self.logits(prompt + output)[len(prompt) - 1 : -1] / temperature
        chosen = torch.tensor(output).unsqueeze(1)
        return torch.log_softmax(logits, -1).gather(1, chosen).squeeze(1).tolist()

    def experts(self, ids: list[int], chosen: int) -> np.ndarray:
        """[tokens, layers, chosen]: the experts by transformers' own router logits, in ascending order."""
        import torch

        with torch.inference_mode():
            out = self.net(input_ids=torch.tensor([ids]), use_cache=False, output_router_logits=True)
        found = [logits.topk(chosen, dim=-1).indices.sort(dim=-1).values for logits in out.router_logits]
        return torch.stack(found, dim=1).numpy()

    def named(self) -> list[tuple[str, Any]]:
        """Hugging Face names and tensors."""
        return [(name, parameter.data) for name, parameter in self.net.named_parameters()]
