"""Runs in each of SGLang's schedulers that takes its weights from a running engine, or lets others write them.

Owns two changes to SGLang 0.5.23, without which its loading from a remote instance cannot be used here: the engine
that has the weights is asked with its key, read from its 0600 file (SGLang asks without one); and an engine that was
loaded so tells where its own weights lie (SGLang registers that memory and never says so). Runs without gyre.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

SEED_KEYS = "GYRE_SEED_KEYS"
"""Environment variable: the key file of the engine that has the weights."""
ASK_SECONDS = 30.0


def run_scheduler_process(*words: Any, **named: Any) -> Any:
    """SGLang's own, changed."""
    from sglang.srt.managers import scheduler
    from sglang.srt.plugins import load_plugins

    load_plugins()
    change()
    return scheduler.run_scheduler_process(*words, **named)


def change() -> None:
    """Replace what is called, where it is called."""
    from sglang.srt.model_executor.model_runner_components import remote_instance_weight_transporter as transporter
    from sglang.srt.model_loader import loader

    kind = transporter.RemoteInstanceWeightTransporter
    publish = kind.maybe_register_and_publish_weight_info

    def publish_what_is_registered(self: Any) -> None:
        if self.engine is not None and self.weight_info is not None:
            self._register_to_engine_info_bootstrap()
        publish(self)

    kind.maybe_register_and_publish_weight_info = publish_what_is_registered
    loader.get_remote_instance_transfer_engine_info_per_rank = memory_of


def memory_of(url: str, rank: int) -> tuple[Any, Any]:
    """Session and parameters of one rank of the engine at `url`; (None, None), which ends the loading, without them."""
    import requests

    key = json.loads(Path(os.environ[SEED_KEYS]).read_text())["admin_key"]
    try:
        answer = requests.get(
            f"{url}/remote_instance_transfer_engine_info",
            params={"rank": rank},
            headers={"Authorization": f"Bearer {key}"},
            timeout=ASK_SECONDS,
        )
        answer.raise_for_status()
        session, parameters = answer.json()["remote_instance_transfer_engine_info"]
    except (requests.RequestException, ValueError, KeyError) as error:
        print(f"the engine at {url} does not tell where its weights lie: {error}", flush=True)
        return None, None
    return session, parameters
