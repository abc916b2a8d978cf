"""A trainer rank: a program that does what its cell's lead says, one operation at a time.

Owns one `Trainer`, the buffers it publishes and those it pulls. Requests are JSON lines on stdin, replies JSON lines
on a descriptor of its own; rank 0 reads them and shares each with the other ranks of the cell. Invariants: an operation
is whole, on all ranks or on none, or an error; a transfer that fails, or an engine, is an answer; everything else ends
the rank and with it the cell's incarnation.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import queue
import sys
import threading
import time
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch
import torch.distributed as dist

from gyre.engines.client import EngineClient
from gyre.engines.push import Carrier, PushFailed, Tensors, push_to_all
from gyre.engines.shared import SharedBuckets
from gyre.errors import UserError
from gyre.ledger.checkpoints import CheckpointMeta, chosen, prune
from gyre.ledger.layout import RunFolder
from gyre.ledger.liveness import Heartbeat
from gyre.ledger.microstep_files import read_microstep
from gyre.processes.address import node_address, node_interface
from gyre.processes.base import BEAT_SECONDS, user_error
from gyre.processes.children import say_last_words
from gyre.processes.placing import Placing
from gyre.recipe.load import load_recipe
from gyre.training.batch import MicroStepBatch
from gyre.training.layout import Layout
from gyre.training.memory import Moved
from gyre.training.settings import TrainSettings, learning_rate
from gyre.training.trainer import Trainer
from gyre.transfer.engine import TransferSession
from gyre.transfer.errors import DigestMismatch, TransferFailed
from gyre.transfer.manifest import Manifest, RankBuffer, make_manifest, read_manifest, write_manifest
from gyre.transfer.publish import BufferKey, Publisher, Puller

BUCKET_BYTES = 256 << 20
IDLE_SECONDS = 60.0
"""How often rank 0 says that there is nothing to do: the others wait in a collective, which gives up after a while."""

Pulled = memoryview | np.ndarray[Any, Any]
"""Verified bytes of a published buffer: staging, or this rank's own publication, which must not be written."""


class Rank:
    """The operations of one rank; each takes and returns JSON values."""

    def __init__(self, run: RunFolder, cell: str, incarnation: int, model: Path, layout: Layout) -> None:
        self.run, self.cell, self.incarnation = run, cell, incarnation
        self.recipe = load_recipe(run.recipe, folders=False)
        self.layout, self.model = layout, model
        self.trainer = Trainer(model, TrainSettings.of(self.recipe), layout, core=False)
        self.publisher = Publisher(TransferSession(node_address()), layout.rank)
        self.puller = Puller(lambda: TransferSession(node_address()))
        self.holds = ""
        """file name of the manifest whose weights the model has; "" after a commit that is not published"""
        self.weights: tuple[int, int] | None = None
        """(lineage, version) of the model's weights, when they are ones that engines are given"""
        self._micro: list[str] = []
        self._openings: list[tuple[int, int]] = []

    # ---- weights ----

    def open_lineage(self, lineage: int, openings: list[tuple[int, int]]) -> dict[str, Any]:
        """Become the core: the newest complete checkpoint, or the model folder; publish what it holds.

        `openings`: (lineage, step it opened from) of the lineages before: void checkpoints are passed over.
        """
        self.trainer.promote()
        found = chosen(self.run.checkpoints, 0, openings) if self.layout.rank == 0 else (None, [])
        info, skipped = self.trainer.agree(found)[0]  # one rank reads and verifies it all
        if info is None:
            self.trainer.load_hf()
        else:
            self.trainer.load_checkpoint(info.path)
        self.trainer.zero_gradients()
        self._micro = []
        step, version = (info.meta.step, info.meta.version) if info is not None else (0, 0)
        self._openings = [*openings, (lineage, step)]
        return {"step": step, "version": version, "skipped": skipped, **self.publish(lineage, step, version)}

    def publish(self, lineage: int, step: int, version: int) -> dict[str, Any]:
        """Freeze the weights in a host buffer that peers can pull, and write its manifest."""
        key = BufferKey("weights", lineage, step)
        buffer = self.publisher.publish(key, self.trainer.weights_flat())
        manifest = self._manifest("weights", lineage, step, version, 0, buffer)
        self._hold(manifest)
        return {"manifest": manifest.file_name, "weight_version": manifest.version_name}

    def _hold(self, manifest: Manifest) -> None:
        self.holds = manifest.file_name
        published = manifest.step == manifest.version * self.recipe.schedule.steps_per_burst
        self.weights = (manifest.lineage, manifest.version) if published else None

    def pull(self, manifest: str) -> dict[str, Any]:
        """Take over the weights of a manifest: its own published buffer, or by a transfer. Gradients are zeroed."""
        began = time.monotonic()
        self.trainer.zero_gradients()
        self._micro = []
        if manifest == self.holds:
            return {"nbytes": 0, "seconds": 0.0}
        found = read_manifest(self.run.weights / manifest)
        data, problem = self._transferred(found)
        if problem:
            raise TransferFailed(problem)
        self.trainer.set_weights_flat([_tensor(data, self.trainer.dtype)])
        self._hold(found)
        return {"nbytes": len(data), "seconds": time.monotonic() - began}

    def push(self, manifest: str, engines: list[dict[str, Any]], weight_version: str) -> dict[str, Any]:
        """Give engines the weights of `manifest`, which this rank's model must hold. Each has a name, url, key_file,
        and says whether shared memory reaches it (`shares`). The answer names those that failed, and why."""
        if self.holds != manifest:
            raise RuntimeError(f"asked to push {manifest} while holding {self.holds or 'unpublished weights'}")
        answer: dict[str, Any] = {}
        tensors = iter(self.trainer.hf_tensors())
        if self.layout.rank == 0:
            try:
                answer = {"checksums": asyncio.run(self._push(tensors, engines, weight_version))}
            except PushFailed as failed:  # they may have died of anything: their lead starts them again
                answer = {"engines_failed": {engines[at]["name"]: str(error) for at, error in failed.failures.items()}}
        for _ in tensors:  # the other ranks' part of the collective, and of what an engine did not take
            pass
        return answer

    async def _push(self, tensors: Any, engines: list[dict[str, Any]], weight_version: str) -> list[str]:
        """SGLang reads what it is offered in this node's memory; the reference engine, and engines that lie elsewhere
        too, read what they are sent; or Mooncake writes it into their memory."""
        rollout = self.recipe.rollout
        keys = [json.loads((self.run.keys / engine["key_file"]).read_text()) for engine in engines]
        here = [own["weights_key"] for own, engine in zip(keys, engines, strict=True) if engine["shares"]]
        shared = SharedBuckets(here[0]) if here and rollout.weights == "shared" else None
        pushes: list[tuple[EngineClient, Carrier]] = []
        async with aiohttp.ClientSession() as session:
            with contextlib.ExitStack() as stack:
                for engine, own in zip(engines, keys, strict=True):
                    client = EngineClient(engine["url"], session, own["api_key"], own["admin_key"], None)
                    carrier: Carrier = Tensors(rollout.tensor_parallel, shared if engine["shares"] else None)
                    if rollout.weights == "mooncake":
                        placing = Placing(node_address(), self.model, rollout.tensor_parallel, self.trainer.dtype)
                        carrier = stack.enter_context(placing)
                    pushes.append((client, carrier))
                return await push_to_all(pushes, tensors, weight_version, BUCKET_BYTES)

    def _bytes(self, manifest: Manifest) -> Pulled:
        """This rank's buffer of a manifest, verified."""
        key = BufferKey(manifest.kind, manifest.lineage, manifest.step, manifest.number)
        buffer = manifest.ranks[self.layout.rank]
        if self.publisher.published().get(key) == buffer:
            return self.publisher.array(key)
        return self.puller.pull(buffer)

    def _transferred(self, manifest: Manifest) -> tuple[Pulled, str]:
        """This rank's buffer; or the first reason for which some rank's did not come, the same on all ranks."""
        data: Pulled = memoryview(b"")
        problem = ""
        try:
            data = self._bytes(manifest)
        except (TransferFailed, DigestMismatch) as error:
            problem = str(error)
        return data, next((text for text in self.trainer.agree(problem) if text), "")

    def _manifest(self, kind: Any, lineage: int, step: int, version: int, number: int, buffer: RankBuffer) -> Manifest:
        manifest = make_manifest(
            kind,
            lineage=lineage,
            step=step,
            version=version,
            cell=self.cell,
            incarnation=self.incarnation,
            number=number,
            ranks=self.trainer.agree(buffer),
        )
        if self.layout.rank == 0:
            write_manifest(self.run.weights / manifest.file_name, manifest)
        return manifest

    def retire(self, keep: list[str]) -> dict[str, Any]:
        """Free published buffers, but for those of the manifests in `keep`: current or leased."""
        kept = [read_manifest(self.run.weights / name) for name in keep]
        freed = self.publisher.retire(BufferKey(m.kind, m.lineage, m.step, m.number) for m in kept)
        return {"freed": len(freed)}

    # ---- gradients ----

    def train(self, microsteps: list[dict[str, str]]) -> dict[str, Any]:
        """Add the gradients of these micro-steps; each file is checked against the digest that was announced."""
        batches = []
        for announced in microsteps:
            path = self.run.microsteps / f"{announced['microstep']}.arrow"
            microstep, digest = read_microstep(path)
            if digest != announced["digest"]:
                raise RuntimeError(f"{path} is not what was announced: digest {digest}, not {announced['digest']}")
            batches.append(MicroStepBatch.of(microstep, self.weights))
            self._micro.append(announced["microstep"])
        return {"stats": [stats.row() for stats in self.trainer.train_microsteps(batches)]}

    def freeze(self, lineage: int, step: int, number: int) -> dict[str, Any]:
        """Publish the gradients as contribution `number`; nothing is added until `zero`."""
        frozen = self.trainer.freeze()
        buffer = self.publisher.publish(BufferKey("gradients", lineage, step, number), frozen.buffers)
        manifest = self._manifest("gradients", lineage, step, 0, number, buffer)
        return {"manifest": manifest.file_name, "microsteps": list(self._micro)}

    def zero(self) -> dict[str, Any]:
        self.trainer.zero_gradients()
        self._micro = []
        return {}

    def merge(self, manifest: str, microsteps: list[str]) -> dict[str, Any]:
        """Add a contribution, on all ranks or on none."""
        overlap = set(microsteps) & set(self._micro)
        if overlap:
            return {"refused": f"{sorted(overlap)[0]} is in the buffer already"}
        data, problem = self._transferred(read_manifest(self.run.weights / manifest))
        if problem:
            return {"refused": problem}
        self.trainer.add_gradients(self._buffers(data))
        self._micro.extend(microsteps)
        return {}

    def _buffers(self, data: Pulled) -> list[torch.Tensor]:
        sizes = [buffer.numel() for buffer in self.trainer.gradients_flat()]
        return list(_tensor(data, torch.float32).split(sizes))

    def commit(
        self,
        lineage: int,
        step: int,
        version: int,
        executions: int,
        microsteps: list[str],
        checkpoint: bool,
        wait: bool,
    ) -> dict[str, Any]:
        """The optimizer step, the checkpoint if due, and the publication.

        A large checkpoint may still be being written then, unless `wait`: a core that is lost before it is complete
        does the step again from its micro-steps.
        """
        if sorted(self._micro) != sorted(microsteps):
            raise RuntimeError(f"step {step}: the buffer holds {len(self._micro)} micro-steps, not the packed ones")
        train = self.recipe.train
        rate = learning_rate(step - 1, train)
        stats = self.trainer.commit(executions, rate, targets=len(microsteps))
        self._micro = []
        self.holds = ""
        writing = False
        if checkpoint:
            writing = self.checkpoint(lineage, step, version, microsteps, wait)["writing"]
        published = self.publish(lineage, step, version)
        return {
            **published,
            "checkpointed": checkpoint and not writing,
            "writing": writing,
            "gradient_norm": stats.grad_norm,
            "skipped": bool(stats.skipped),
            "learning_rate": rate,
        }

    def checkpoint(
        self, lineage: int, step: int, version: int, microsteps: list[str], wait: bool = True
    ) -> dict[str, Any]:
        """Save the weights and the optimizer as they are after `step`, made of `microsteps`; old ones are pruned.

        Without `wait` a large one may be written in the background; `written` then tells when it is complete.
        """
        meta = CheckpointMeta(lineage, step, version, tuple(microsteps))
        where = (self.run.checkpoints, meta, f"{self.cell}.{self.incarnation}")
        writing = False
        if wait:
            self.trainer.save_checkpoint(*where)
        else:
            writing = self.trainer.begin_checkpoint(*where)
        self._prune(lineage)
        return {"writing": writing}

    def written(self, wait: bool) -> dict[str, Any]:
        """Has a checkpoint become complete in the background?"""
        info = self.trainer.checkpoint_written(wait)
        if info is not None:
            self._prune(info.meta.lineage)
        return {"written": info is not None}

    def _prune(self, lineage: int) -> None:
        if self.layout.rank == 0:
            prune(self.run.checkpoints, self.recipe.train.keep_checkpoints, lineage, self._openings)

    # ---- memory ----

    def offload(self, weights: bool) -> dict[str, Any]:
        return self._moved([self.trainer.offload(weights)])

    def onload(self) -> dict[str, Any]:
        return self._moved([self.trainer.onload()])

    def _moved(self, own: list[Moved]) -> dict[str, Any]:
        """Of all ranks: bytes together, the slowest one's time, the least free memory."""
        moves = [moved for part in self.trainer.agree(own) for moved in part]
        return {
            "nbytes": sum(moved.nbytes for moved in moves),
            "seconds": max(moved.seconds for moved in moves),
            "free": min(moved.free for moved in moves),
        }


def _tensor(data: Pulled, dtype: torch.dtype) -> torch.Tensor:
    """The bytes as a flat tensor, over the memory where they landed: it holds until the next pull."""
    flat = np.asarray(data)
    return torch.from_numpy(flat if flat.flags.writeable else flat.copy()).view(dtype)


OPERATIONS = frozenset(
    {
        "open_lineage",
        "pull",
        "push",
        "retire",
        "train",
        "freeze",
        "zero",
        "merge",
        "commit",
        "written",
        "checkpoint",
        "offload",
        "onload",
    }
)


def serve(rank: Rank, requests: queue.Queue[str], replies: Any) -> None:
    """Do requests for ever. A failed transfer is answered; any other error ends the process."""
    while True:
        request = json.loads(next_request(rank.layout, requests))
        name = request.pop("op")
        if name not in OPERATIONS:
            raise ValueError(f"no operation {name!r}")
        try:
            reply = getattr(rank, name)(**request)
        except (TransferFailed, DigestMismatch) as error:
            reply = {"transfer_failed": str(error)}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def next_request(layout: Layout, requests: queue.Queue[str]) -> str:
    """The lead's next line, on every rank. It may be long in coming: a cell that serves has nothing to train."""
    while True:
        line = [""]
        if layout.rank == 0:
            with contextlib.suppress(queue.Empty):
                line = [requests.get(timeout=IDLE_SECONDS if layout.world > 1 else None)]
        if layout.world > 1:
            dist.broadcast_object_list(line, src=0)
        if line[0]:
            return line[0]


def read_requests(requests: queue.Queue[str]) -> None:
    """Feed the queue; at end of file the lead is gone, and nothing that this rank still does could count."""
    for line in sys.stdin:
        requests.put(line)
    os._exit(3)


def beat(counter: Path) -> None:
    """Tell the lead, for ever, that this process is not stopped. A full disk is for what writes to it to tell."""
    heart = Heartbeat(counter)
    while True:
        with contextlib.suppress(UserError):
            heart.beat()
        time.sleep(BEAT_SECONDS)


def main() -> None:
    """A user's mistake, or a full disk, is one line for the lead, and an exit code."""
    options = arguments()
    run = RunFolder(Path(options.run))
    try:
        train_for(run, options)
    except (UserError, OSError) as error:
        mistake = user_error(run, error)
        if mistake is None:
            raise
        say_last_words(f"{options.cell}-rank-{options.rank}: {mistake}")
        os._exit(mistake.code)  # threads of the transfer engine may not let the interpreter go


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="one trainer rank of a cell")
    parser.add_argument("--run", required=True)
    parser.add_argument("--cell", required=True)
    parser.add_argument("--incarnation", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--rendezvous", default="")
    parser.add_argument("--reply-fd", type=int, default=-1, help="rank 0 only")
    parser.add_argument("--listener", type=int, default=-1, help="rank 0 of several nodes: where the others come")
    return parser.parse_args()


def train_for(run: RunFolder, options: argparse.Namespace) -> None:
    """Serve the lead until it is gone."""
    requests: queue.Queue[str] = queue.Queue()
    threading.Thread(target=read_requests, args=(requests,), daemon=True).start()
    counter = run.alive_path(f"{options.cell}-rank-{options.rank}")
    threading.Thread(target=beat, args=(counter,), daemon=True).start()
    torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", "1"))))
    recipe = load_recipe(run.recipe, folders=False)
    nodes = recipe.cells.nodes_per_cell
    if nodes > 1:
        os.environ.update(node_interface())
    layout = Layout.of(recipe.train, options.rank, options.rendezvous, nodes, options.listener)
    rank = Rank(run, options.cell, options.incarnation, Path(options.model), layout)
    with open(os.devnull, "w") if options.rank else os.fdopen(options.reply_fd, "w") as replies:
        replies.write("{}\n")  # ready
        replies.flush()
        serve(rank, requests, replies)


if __name__ == "__main__":
    main()
