"""What an execution takes on disk, by its unique tokens, and what it would take with one whole row a call.

Run: `python tests/bench/bench_proxy_disk.py [--executions 4] [--calls 100] [--tail 900] [--output 150]`.

Turns of real text's token ids (no piece twice), with log-probabilities that have a sampler's spread, go through the
worker's own shards and are sealed. Beside it the same calls are stored with one whole row each, prompt and all, in the
same format with the same compression.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path

import proxy_lab as lab

from gyre.ledger.layout import RunFolder
from gyre.ledger.shards import TurnWriter
from gyre.ledger.turns import Span, Turn
from gyre.proxy.template import load


def play(folder: Path, told: argparse.Namespace, ids: list[int], whole: bool) -> tuple[int, int, int]:
    """(bytes while growing, bytes once sealed, unique tokens) of all executions. `whole`: a row has all its prompt."""
    (folder / "trajectories").mkdir(parents=True)
    # One shard for all, so that both ways are compressed alike.
    writer = TurnWriter(RunFolder(folder), "worker-0", 1, max_bytes=1 << 40)
    source = random.Random(1)
    unique = at = 0
    for execution in range(told.executions):
        history: list[int] = []
        for number in range(told.calls):
            context, output = ids[at : at + told.tail], ids[at + told.tail : at + told.tail + told.output]
            at += told.tail + told.output
            keep = 0 if whole else len(history)
            history += context
            writer.append(
                Turn(
                    execution=f"g{execution:05d}-00",
                    attempt=0,
                    turn=number,
                    parent=-1 if whole else number - 1,
                    keep=keep,
                    context=list(history) if whole else context,
                    output=output,
                    logprobs=[-source.expovariate(2.0) for _ in output],
                    spans=[Span(1, 1, len(output))],
                    started=1e9 + number,
                    first_token=1e9 + number + source.random(),
                    finished=1e9 + number + 1 + source.random(),
                    cell="cell-0",
                    cached_tokens=len(history),
                    request_digest=f"{source.getrandbits(256):064x}",
                )
            )
            history += output
        unique += len(history)
    growing = sum(path.stat().st_size for path in folder.glob("trajectories/worker-0/*.arrows"))
    writer.close()
    sealed = sum(path.stat().st_size for path in folder.glob("trajectories/worker-0/*.arrow"))
    return growing, sealed, unique


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--executions", type=int, default=4)
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--tail", type=int, default=900)
    parser.add_argument("--output", type=int, default=150)
    told = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lab.make_model(folder / "model")
        ids = load(folder / "model", "qwen3").encode(lab.source_text()[:4_000_000])
        growing, sealed, unique = play(folder / "tree", told, ids, whole=False)
        rows_growing, rows_sealed, same = play(folder / "rows", told, ids, whole=True)
    assert same == unique
    print(f"{told.executions} executions of {told.calls} calls, {unique // told.executions} unique tokens each")
    print(f"  bytes a token: {growing / unique:.1f} growing, {sealed / unique:.1f} sealed")
    print(
        f"  one whole row a call: {rows_growing / unique:.1f} growing, {rows_sealed / unique:.1f} sealed: "
        f"{rows_growing / growing:.0f} and {rows_sealed / sealed:.0f} times as much"
    )


if __name__ == "__main__":
    main()
