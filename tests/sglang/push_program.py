"""One rank of a trainer that pushes its weights: `python push_program.py FOLDER RANK`; FOLDER/order.json says what."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import aiohttp
import torch

from gyre.engines.client import EngineClient
from gyre.engines.push import push_weights
from gyre.processes.placing import Placing
from gyre.training.layout import Layout
from gyre.training.settings import TrainSettings
from gyre.training.trainer import Trainer


async def push(order: dict[str, Any], tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    async with aiohttp.ClientSession() as session:
        client = EngineClient(order["url"], session, order["api_key"], order["admin_key"])
        ranks = order["engine_ranks"]
        if order["written"]:
            with Placing("127.0.0.1", Path(order["model"]), ranks, torch.float32) as placing:
                return await push_weights(client, tensors, order["version"], 1 << 16, carrier=placing)
        return await push_weights(client, tensors, order["version"], 1 << 16, ranks, order["weights_key"])


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    order = json.loads((folder / "order.json").read_text())
    world = order["ranks"]
    layout = Layout(rank, world, tensor=world, rendezvous=f"file://{folder}/rendezvous") if world > 1 else Layout()
    trainer = Trainer(Path(order["model"]), TrainSettings(), layout, core=False)
    trainer.load_hf()
    tensors = trainer.hf_tensors()
    if rank == 0:
        (folder / "checksum").write_text(asyncio.run(push(order, tensors)))
    for _ in tensors:  # the other ranks' part of the collective
        pass
    trainer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
