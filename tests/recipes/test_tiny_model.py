"""The tiny model's tokenizer, demonstrations, folder and cache key."""

from __future__ import annotations

import functools
import hashlib
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer

from gyre.executions.harnesses.shell_prompt import TOOL
from recipes.tasks.generate import generate_task
from recipes.tiny_model import build as script
from recipes.tiny_model.conversation import encode, render
from recipes.tiny_model.demonstrations import conversation, demonstration, malformed, result_of
from recipes.tiny_model.vocabulary import MARKERS, SPECIAL, token_id, train_tokenizer

SCRIPT = Path(script.__file__)


@functools.cache
def tokenizer() -> Tokenizer:
    rng = random.Random(5)
    return train_tokenizer(render(demonstration(rng, True)) for _ in range(200))


@settings(deadline=None, max_examples=50)
@given(st.text())
def test_every_text_round_trips(text: str) -> None:
    ids = tokenizer().encode(text, add_special_tokens=False).ids
    assert tokenizer().decode(ids, skip_special_tokens=False) == text


def test_every_byte_is_in_the_vocabulary() -> None:
    for value in range(256):
        text = bytes([value]).decode("latin-1")
        ids = tokenizer().encode(text, add_special_tokens=False).ids
        assert tokenizer().decode(ids) == text


@pytest.mark.parametrize("marker", SPECIAL + MARKERS)
def test_a_marker_is_one_token(marker: str) -> None:
    assert tokenizer().encode(f"a{marker}b", add_special_tokens=False).tokens == ["a", marker, "b"]


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**32), st.booleans())
def test_targets_are_exactly_the_assistants_tokens(seed: int, right: bool) -> None:
    messages = demonstration(random.Random(seed), right)
    ids, targets = encode(tokenizer(), messages)
    assert tokenizer().decode(ids, skip_special_tokens=False) + "\n" == render(messages)
    trained = [i for i, target in zip(ids, targets, strict=True) if target]
    said = [message for message in messages if message["role"] == "assistant"]
    alone = [render([{"role": "user", "content": ""}, message]).split("<|im_start|>assistant\n")[1] for message in said]
    expected = "".join(text.removesuffix("\n") for text in alone)
    assert tokenizer().decode(trained, skip_special_tokens=False) == expected
    assert trained.count(token_id(tokenizer(), "<|im_end|>")) == len(said)


def test_a_right_demonstration_calls_and_ends() -> None:
    messages = demonstration(random.Random(3), True)
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert messages[3]["content"] == "ok"
    assert messages[4]["content"] == "done"


def test_a_demonstration_is_a_function_of_the_generator() -> None:
    assert demonstration(random.Random(9), False) == demonstration(random.Random(9), False)


def test_a_malformed_call_is_not_json_with_arguments() -> None:
    text = malformed('echo "a" > b.txt')
    body = json.loads(text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
    assert body == {"name": "bash", "command": 'echo "a" > b.txt'}


def test_a_missing_file_is_reported() -> None:
    rng = random.Random(1)
    task = next(task for task in iter(lambda: generate_task(rng), None) if task.kind == "sort")
    assert result_of(task, task.command) == "ok"
    assert result_of(task, "sort absent.txt > out.txt").endswith("absent.txt: No such file or directory\n[exit code 2]")
    assert conversation(task, "sort absent.txt > out.txt")[3]["content"].startswith("sort: cannot read")


@pytest.mark.parametrize(
    ("rows", "expected"), [([[1, 2, 3], [1, 2, 4], [1, 2]], 2), ([[1], [2]], 0), ([[5, 6]], 2), ([[], [1]], 0)]
)
def test_common_start(rows: list[list[int]], expected: int) -> None:
    from recipes.tiny_model.warmup import common_start

    assert common_start(rows) == expected


def test_running_the_common_start_once_changes_no_loss(untrained: Path) -> None:
    import torch
    from transformers import Qwen3ForCausalLM

    from recipes.tiny_model.warmup import batch_of, loss_on_targets

    model = Qwen3ForCausalLM.from_pretrained(untrained)
    rng = random.Random(6)
    rows = [encode(tokenizer(), demonstration(rng, False)) for _ in range(4)]
    ids, targets = batch_of(rows, 0)
    logits = model(input_ids=ids).logits[:, :-1][targets[:, 1:]]
    expected = torch.nn.functional.cross_entropy(logits, ids[:, 1:][targets[:, 1:]])
    assert loss_on_targets(model, rows, 0).item() == pytest.approx(expected.item(), rel=1e-5)


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    script.build(folder, 1, steps=0)
    return folder


def test_transformers_loads_the_folder(untrained: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(untrained)
    assert (model.config.hidden_size, model.config.num_hidden_layers, model.config.head_dim) == (96, 3, 24)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    loaded = AutoTokenizer.from_pretrained(untrained)
    assert loaded.eos_token == "<|im_end|>"
    assert model.config.eos_token_id == loaded.eos_token_id
    assert model.config.vocab_size == len(loaded)
    messages = demonstration(random.Random(4), True)
    assert loaded.apply_chat_template(messages, tools=[TOOL], tokenize=False) == render(messages)


def test_the_same_seed_gives_the_same_files(untrained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "again"
    command = [sys.executable, str(SCRIPT), "--untrained", "--seed", "1", "--out", str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path)
    assert "tiny model: 0/0" in done.stdout
    assert digests(folder) == digests(untrained)
    assert [path.name for path in tmp_path.iterdir()] == ["again"]


def test_a_finished_folder_is_left_alone(untrained: Path) -> None:
    before = (untrained / "model.safetensors").stat().st_mtime_ns
    script.build(untrained, 1, steps=0)
    assert (untrained / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(FileExistsError, match="is not this model"):
        script.build(untrained, 2, steps=0)


def test_the_key_depends_on_seed_and_steps() -> None:
    keys = {script.cache_key(1), script.cache_key(2), script.cache_key(1, 0), script.cache_key(1, 60)}
    assert len(keys) == 4
    shown = subprocess.run([sys.executable, str(SCRIPT), "--key", "--seed", "2"], capture_output=True, text=True)
    assert shown.stdout.strip() == script.cache_key(2)


def test_the_key_is_cheap() -> None:
    code = (
        f"import runpy, sys; sys.argv = ['build.py', '--key']\n"
        f"try: runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
        "except SystemExit: pass\nprint('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split()[-1] == "False"


@pytest.mark.slow
def test_a_short_warm_start_learns_to_call(tmp_path: Path) -> None:
    seen: list[str] = []
    script.build(tmp_path / "warm", 1, lambda done, total, what: seen.append(what), steps=60)
    losses = [float(what.rsplit(" ", 1)[1]) for what in seen if "loss" in what]
    assert len(losses) == 60
    assert losses[0] > 4.0
    assert min(losses[40:50]) < 0.3
