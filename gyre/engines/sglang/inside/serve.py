"""Starts SGLang's server, in SGLang's own environment: `python serve.py --port-file F --key-file F -- ARGUMENTS`.

Owns what the lead needs of a server and SGLang's command line does not give: keys from a 0600 file, which go to the
server's gate and nowhere else (among SGLang's arguments they would be in its log and in what /server_info tells); a
port of its own choice, written to the port file once the server answers; and an end when the parent's pipe closes. On
the nodes of an engine after the first nothing listens, and the port file holds 0. Runs without gyre; `sglang` is
imported here and nowhere else.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, NoReturn

from gyre_scheduler import SEED_KEYS, run_scheduler_process

WRITABLE = "--remote-instance-weight-loader-start-seed-via-transfer-engine"
WARM_SECONDS = 600.0
POLL_SECONDS = 0.2


class Server:
    """One launch."""

    def __init__(self, port_file: Path, keys: dict[str, str], words: list[str]) -> None:
        self.port_file = port_file
        self.keys = keys
        self.guarded = False
        self.port = 0
        self.held, self.told = socket.socket(), socket.socket()
        self.words = words

    def run(self) -> None:
        """Serve until the server ends."""
        from sglang.srt.entrypoints import http_server
        from sglang.srt.plugins import load_plugins
        from sglang.srt.utils import auth

        load_plugins()
        # the secret by which the schedulers, who inherit it, are given the descriptors of weights in shared memory
        multiprocessing.current_process().authkey = (self.keys.get("weights_key") or self.keys["admin_key"]).encode()
        arguments = self._parse()
        gate = auth.add_api_key_middleware

        def guard(app: Any, **_: Any) -> None:
            gate(app, api_key=self.keys["api_key"], admin_api_key=self.keys["admin_key"])
            self.guarded = True

        auth.add_api_key_middleware = guard
        http_server.app_has_admin_force_endpoints = lambda _: True  # what asks for the gate when no key is set
        # SGLang would call its own server without a key after the warm-up; `_warm` does that.
        http_server._freeze_gc_after_server_warmup = lambda _: None
        if WRITABLE in self.words:
            self._tell_memory_on_loopback()
        arguments.resolve_once()
        if arguments.node_rank:
            write_aside(self.port_file, "0")
        http_server.launch_server(
            arguments,
            **({"run_scheduler_process_func": run_scheduler_process} if WRITABLE in self.words else {}),
            execute_warmup_func=lambda _: self._warm(http_server),
            launch_callback=self._ready,
        )

    def _parse(self) -> Any:
        from sglang.srt.server_args import prepare_server_args

        host = self.words[self.words.index("--host") + 1]
        self.port = hold(self.held, host)
        self.url = f"http://{host}:{self.port}"
        words = [*self.words, "--port", str(self.port)]
        if WRITABLE in self.words:
            words += ["--engine-info-bootstrap-port", str(hold(self.told, "127.0.0.1"))]
        refuse_clearly()
        return prepare_server_args(words)

    def _tell_memory_on_loopback(self) -> None:
        """The ranks tell a server of this process where their weights lie, and whoever wants to know asks the main one.
        That server asks for no key, and the ranks of one node look for it on loopback: there it is."""
        from sglang.srt.entrypoints import engine
        from sglang.srt.server_args import ServerArgs

        if "--dist-init-addr" in self.words:
            return
        told = engine.EngineInfoBootstrapServer
        engine.EngineInfoBootstrapServer = lambda host, port: told("127.0.0.1", port)
        ServerArgs.engine_info_bootstrap_url = property(
            lambda arguments: f"http://127.0.0.1:{arguments.engine_info_bootstrap_port}"
        )

    def _warm(self, http_server: Any) -> bool:
        """One token, and the collector's frozen heap, as SGLang's own warm-up does it; with our keys."""
        if not self.guarded:
            fail("this SGLang does not ask for keys where gyre expects it: use the version that gyre installs")
        deadline = time.monotonic() + WARM_SECONDS
        while not self._answers("/model_info", None, "api_key"):
            if time.monotonic() > deadline:
                fail("the server does not answer itself")
            time.sleep(POLL_SECONDS)
        body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
        if not self._answers("/generate", body, "api_key"):
            fail("the server cannot generate a token")
        self._answers("/freeze_gc", {}, "admin_key")
        status = http_server.ServerStatus.Up
        http_server._global_state.tokenizer_manager.server_status = status
        return True

    def _answers(self, path: str, body: dict[str, Any] | None, key: str) -> bool:
        data = json.dumps(body).encode() if body is not None else None
        headers = {"Authorization": f"Bearer {self.keys[key]}", "Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=WARM_SECONDS) as answer:
                return bool(answer.status == 200)
        except urllib.error.HTTPError as error:
            fail(f"the server answers {error.code} to {path}")
        except OSError:
            return False

    def _ready(self) -> None:
        self.held.close()
        self.told.close()
        write_aside(self.port_file, str(self.port))


def hold(held: socket.socket, host: str) -> int:
    """A port until a server listens there, a minute later: one that is bound is given to nobody who asks for any, and
    a socket that allows its reuse and does not listen is not in the server's way."""
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((host, 0))
    return int(held.getsockname()[1])


def write_aside(path: Path, text: str) -> None:
    """Whole or not there."""
    aside = path.with_name(path.name + ".new")
    aside.write_text(text)
    aside.rename(path)


def refuse_clearly() -> None:
    """A wrong argument ends the program with one line that the lead passes on to the user."""

    def error(self: argparse.ArgumentParser, message: str) -> NoReturn:
        print(f"error: rollout.arguments: {message}", file=sys.stderr, flush=True)
        os._exit(2)

    argparse.ArgumentParser.error = error  # type: ignore[method-assign]


def fail(message: str) -> NoReturn:
    """End everything, from whatever thread; the log's last line says why."""
    end(1, f"error: SGLang: {message}")


def end(code: int, words: str = "") -> NoReturn:
    """End this process and its children at once."""
    from sglang.srt.utils import kill_process_tree

    kill_process_tree(os.getpid(), include_parent=False)
    if words:
        print(words, file=sys.stderr, flush=True)
    os._exit(code)


def end_with_parent() -> None:
    """At end of file on stdin the lead is gone."""
    while os.read(0, 4096):
        pass
    end(3)


def main() -> None:
    parser = argparse.ArgumentParser(description="SGLang's server, as a cell's lead starts it")
    parser.add_argument("--port-file", type=Path, required=True)
    parser.add_argument("--key-file", type=Path, required=True)
    parser.add_argument("--seed-keys", type=Path, help="key file of the engine that the weights are taken from")
    parser.add_argument("words", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    threading.Thread(target=end_with_parent, name="parent", daemon=True).start()
    if options.seed_keys is not None:
        os.environ[SEED_KEYS] = str(options.seed_keys)
    words = options.words[1:] if options.words[:1] == ["--"] else options.words
    Server(options.port_file, json.loads(options.key_file.read_text()), words).run()


if __name__ == "__main__":
    main()
