"""A checkpoint that is being written while the run goes on, and everything killed in the middle of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gyre.ledger.checkpoints import final_path, newest_complete
from gyre.ledger.state import RunState
from gyre.training.saving import SMALL_BYTES
from recipes.tiny_model.build import build
from tests.chaos import procs
from tests.chaos.harness import Drill
from tests.chaos.moments import CORE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 4
ONE_CELL = ("cells.count=1", "rollout.executions_per_cell=8", "harness.max_turns=1", "harness.max_tokens=16")


def large(folder: Path, tokenizer: Path) -> Path:
    """A random model whose checkpoints are worth a thread."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = json.loads((tokenizer / "config.json").read_text())
    config |= {"hidden_size": 256, "intermediate_size": 1280, "num_hidden_layers": 6, "head_dim": 64}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "layer_types": ["full_attention"] * 6}
    shutil.copytree(tokenizer, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json", "COMPLETE"))
    torch.manual_seed(5)
    model = Qwen3ForCausalLM(Qwen3Config(**config))
    assert 3 * 4 * sum(parameter.numel() for parameter in model.parameters()) > SMALL_BYTES  # Adam's moments beside it
    model.save_pretrained(folder)
    return folder


def looked_at(drill: Drill, step: int) -> Callable[[RunState], bool]:
    """The step is committed, so the run goes on from it, and its checkpoint is begun, or complete."""

    def begun(state: RunState) -> bool:
        reign, pattern = state.reign(), f"step-{step:06d}.zarr*"
        return reign is not None and step in reign.committed and bool(list(drill.run.checkpoints.glob(pattern)))

    return begun


def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before(
    drills: Callable[..., Drill], tmp_path: Path
) -> None:
    build(tmp_path / "small", seed=1, steps=0)
    model = large(tmp_path / "large", tmp_path / "small")
    settings = (f"model.path={model}", "model.build=", "model.build_arguments=[]", *ONE_CELL)
    drill = drills(steps=STEPS, settings=settings)
    drill.submit()
    for step in range(2, STEPS):
        drill.until(looked_at(drill, step))
        rank = drill.rank(CORE)
        procs.freeze(rank)
        if not final_path(drill.run.checkpoints, step).exists():
            break
        procs.thaw(rank)
    else:
        pytest.skip("every checkpoint was complete before it was looked at")
    drill.view.poll()  # type: ignore[union-attr]
    assert not drill.state.lineages[1].committed[step].checkpointed  # said without waiting for it
    assert list(drill.run.checkpoints.glob(f"step-{step:06d}.zarr.tmp-1-*"))
    assert drill.process is not None
    drill.kill(drill.process.pid, rank)
    drill.process.wait()
    drill.wait(lambda: not procs.belonging(drill.run.path), running=False)
    found, passed = newest_complete(drill.run.checkpoints)
    assert (found.meta.step if found else 0, passed) == (step - 1, [])

    drill.resume()
    drill.assert_completed()
    assert drill.state.lineages[2].opened.step == step - 1
    assert drill.state.history()[step][0] == 2  # made again, from its micro-step files
    kept = [f"step-{number:06d}.zarr" for number in (STEPS - 1, STEPS)]
    assert sorted(path.name for path in drill.run.checkpoints.iterdir()) == kept  # nothing half-written among them
    drill.assert_replays(STEPS)
