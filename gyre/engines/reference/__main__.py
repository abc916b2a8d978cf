"""`python -m gyre.engines.reference`: one engine process.

It listens on one address, writes the real port to a file once it serves, and leaves when told (SIGTERM, SIGINT),
when its parent's pipe closes (`--exit-on-eof`), or when the compute thread fails (exit code 1).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from gyre.errors import UserError

_GRACE_SECONDS = 10.0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gyre.engines.reference", description="A small engine with SGLang's routes.")
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free port")
    parser.add_argument("--port-file", help="written, whole, once the engine serves")
    parser.add_argument("--key-file", help='JSON of mode 0600: {"api_key": ..., "admin_key": ...}')
    parser.add_argument("--weight-version", default="default")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--seed", type=int, help="of sampling without a seed of its own; default: random")
    parser.add_argument("--max-running-requests", type=int, default=64)
    parser.add_argument("--context-length", type=int, help="default: the model's")
    parser.add_argument("--chunked-prefill-size", type=int, default=2048, help="prefill tokens a step")
    parser.add_argument("--max-total-tokens", type=int, default=32768, help="tokens that the prefix cache keeps")
    parser.add_argument("--page-size", type=int, default=8, help="granularity of prefix reuse, in tokens")
    parser.add_argument("--stream-interval", type=int, default=1, help="tokens between streamed events")
    parser.add_argument("--exit-on-eof", action="store_true", help="exit when standard input closes")
    return parser.parse_args(argv)


def _build(args: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """The batch with its model, and the figures that /server_info shows."""
    import torch

    from gyre.engines.reference.batch import Batch, Limits
    from gyre.engines.reference.model import Model

    torch.set_num_threads(args.threads)
    model = Model(args.model, getattr(torch, args.dtype))
    limits = Limits(
        slots=args.max_running_requests,
        context=args.context_length or model.context_length,
        step_tokens=args.chunked_prefill_size,
        cache_tokens=args.max_total_tokens,
        page=args.page_size,
    )
    batch = Batch(model, limits, int.from_bytes(os.urandom(7)) if args.seed is None else args.seed)
    batch.version = args.weight_version
    info = {
        "model_path": args.model,
        "dtype": args.dtype,
        "vocab_size": model.vocab_size,
        "context_length": limits.context,
        "max_running_requests": limits.slots,
        "chunked_prefill_size": limits.step_tokens,
        "max_total_tokens": limits.cache_tokens,
        "page_size": limits.page,
        "stream_interval": args.stream_interval,
        "version": "gyre-reference",
    }
    return batch, info


async def _serve(args: argparse.Namespace, batch: Any, info: dict[str, Any]) -> int:
    from aiohttp import web

    from gyre.engines.reference.auth import read_keys
    from gyre.engines.reference.engine import Engine
    from gyre.engines.reference.server import Server

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    server = Server(lambda on_news: Engine(batch, on_news), info, read_keys(args.key_file))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if args.exit_on_eof:
        threading.Thread(target=_watch_parent, args=(loop, stop), name="parent", daemon=True).start()
    server.engine.start()
    # A client that goes away cancels its handler, which aborts its request.
    runner = web.AppRunner(server.app, handler_cancellation=True, access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    site = web.TCPSite(runner, args.host, args.port)
    await site.start()
    port = runner.addresses[0][1]
    if args.port_file:
        _write_whole(Path(args.port_file), f"{port}\n")
    print(f"serving {args.model} on http://{args.host}:{port}", flush=True)
    waits = [asyncio.create_task(event.wait()) for event in (stop, server.failed)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    await runner.cleanup()
    if server.engine.failure is not None:
        print(server.engine.failure, file=sys.stderr, flush=True)
        return 1
    server.engine.stop()
    return 0


def _watch_parent(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """Return only when standard input is at its end: the parent is gone."""
    while sys.stdin.buffer.read(4096):
        pass
    loop.call_soon_threadsafe(stop.set)
    time.sleep(_GRACE_SECONDS)
    os._exit(1)


def _write_whole(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(text)
    aside.replace(path)


def main(argv: list[str] | None = None) -> int:
    """Run until told to leave; returns the exit status."""
    args = _arguments(argv)
    try:
        batch, info = _build(args)
        return asyncio.run(_serve(args, batch, info))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # everything is closed; taking torch down in order would cost a second of CPU
