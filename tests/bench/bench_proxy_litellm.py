"""gyre's proxy beside LiteLLM's, in front of the same instant engine, with the same requests.

Run: `python tests/bench/bench_proxy_litellm.py [--concurrency 1,16,64] [--seconds 10] [--context 10000]`. LiteLLM is
installed into a virtual environment of its own, in a cache folder, the first time (`--litellm FOLDER` names another
one, `--offline` skips the installation); where there is none, the bench says so and ends.

Each of C agents keeps a conversation of its own (OpenAI's Chat Completions; it has the asked context at its first call,
gains 1,000 tokens a call, and is begun anew after 30 calls) and calls as fast as replies come. gyre calls the engine's
/generate with token ids, LiteLLM its /v1/chat/completions; the engine reads neither. Added latency is what a call takes
beyond the same call made to the engine itself.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import proxy_lab as lab

PACKAGE = "litellm[proxy]"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "gyre" / "bench" / "litellm"
CALLS = 30
KEY = "sk-" + secrets.token_hex(8)


def environment(folder: Path, offline: bool) -> Path | None:
    """The `litellm` program of an environment in `folder`, made if need be; None where that is not possible."""
    program = folder / "bin" / "litellm"
    if not program.is_file() and not offline:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(folder / "bin" / "pip"), "install", "-q", PACKAGE], check=False)
    return program if program.is_file() else None


@contextlib.contextmanager
def litellm(program: Path, folder: Path, engine: str) -> Iterator[lab.Child]:
    """LiteLLM's proxy, one worker, as its manual sets it up for speed."""
    config = folder / "litellm.yaml"
    config.write_text(
        "model_list:\n  - model_name: m\n    litellm_params:\n"
        f"      model: openai/m\n      api_base: {engine}/v1\n      api_key: k\n"
        "litellm_settings:\n  num_retries: 0\n  request_timeout: 600\n  set_verbose: false\n"
        f"general_settings:\n  master_key: {KEY}\n"
    )
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [str(program), "--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    clean |= {"LITELLM_LOG": "ERROR", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MODE": "PRODUCTION"}
    with open(folder / "litellm.log", "wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=clean)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(url + "/health/liveliness", process, folder / "litellm.log")
        yield lab.Child(process, url, port)
    finally:
        process.terminate()
        process.wait(timeout=30)


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 300
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError):
            with urllib.request.urlopen(url, timeout=5):
                return
        time.sleep(0.5)
    raise SystemExit(f"LiteLLM does not start:\n{log.read_text(errors='replace')[-2000:]}")


class Agents:
    """What C agents saw."""

    def __init__(self, told: argparse.Namespace, text: str, tail: int) -> None:
        self.told, self.text, self.tail = told, text, tail
        self.seeds = 0

    def conversation(self) -> lab.Conversation:
        """A new one, which has the asked context from its first call on."""
        self.seeds += 1
        made = lab.Conversation("chat", self.text, self.tail, self.seeds)
        at = made.random.randrange(len(self.text) // 2)
        made.say({"role": "user", "content": self.text[at : at + self.tail * self.told.context // 1000]})
        return made

    async def run(self, port: int, concurrency: int, keys: list[str], seconds: float) -> list[float]:
        """Latencies of the calls of `concurrency` agents in `seconds`, begun after each had made one."""
        latencies: list[float] = []
        started = asyncio.Barrier(concurrency)

        async def agent(number: int, connection: lab.Connection) -> None:
            conversation, key = self.conversation(), keys[number % len(keys)]
            # Agents do not all begin anew at the same time.
            left = conversation.random.randrange(CALLS)
            await lab.timed(connection, conversation, key)
            await started.wait()
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                began, ended, _ = await lab.timed(connection, conversation, key)
                latencies.append(ended - began)
                left -= 1
                if not left:
                    conversation, left = self.conversation(), CALLS

        async with lab.connections(port, concurrency) as opened:
            await asyncio.gather(*(agent(number, connection) for number, connection in enumerate(opened)))
        return latencies


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--concurrency", type=lambda s: [int(n) for n in s.split(",")], default=[1, 16, 64])
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--context", type=int, default=10_000)
    parser.add_argument("--litellm", type=Path, default=CACHE)
    parser.add_argument("--offline", action="store_true")
    told = parser.parse_args()
    program = environment(told.litellm, told.offline)
    if program is None:
        print(f"skipped: LiteLLM is not in {told.litellm}, and {PACKAGE} could not be installed there")
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lab.make_model(folder / "model")
        text = lab.source_text()
        tail = int(900 * lab.characters_per_token(folder, text))
        agents = Agents(told, text, tail)
        most = max(told.concurrency)
        with (
            lab.child("engine", folder) as engine,
            lab.child("proxy", folder, engine.url, most) as ours,
            litellm(program, folder, engine.url) as theirs,
        ):
            for concurrency in told.concurrency:
                compare(agents, concurrency, engine, {"gyre": ours, "LiteLLM": theirs})


def compare(agents: Agents, concurrency: int, engine: lab.Child, proxies: dict[str, lab.Child]) -> None:
    """Print what each proxy did for `concurrency` agents."""
    seconds = agents.told.seconds
    straight = asyncio.run(agents.run(engine.port, concurrency, ["k"], seconds / 3))
    base = statistics.median(straight) * 1000
    about = f"{concurrency} agents, {agents.told.context} tokens and more; load {lab.load_average()}"
    print(f"{about}; the engine itself {base:.1f} ms")
    rates = []
    for name, proxy in proxies.items():
        keys = [KEY] if name == "LiteLLM" else [lab.key_of(number) for number in range(concurrency)]
        cpu = proxy.cpu
        found = sorted(asyncio.run(agents.run(proxy.port, concurrency, keys, seconds)))
        cpu = (proxy.cpu - cpu) / (len(found) + concurrency) * 1000
        rates.append(len(found) / seconds)
        p50, p99 = statistics.median(found) * 1000 - base, found[int(len(found) * 0.99)] * 1000 - base
        print(
            f"  {name:8} {rates[-1]:6.1f} calls/s, added ms {p50:7.1f} (p50) {p99:7.1f} (p99), "
            f"CPU a call {cpu:5.1f} ms, {proxy.memory:.0f} MiB"
        )
    print(f"  gyre / LiteLLM: {rates[0] / rates[1]:.1f} x the calls a second")


if __name__ == "__main__":
    main()
