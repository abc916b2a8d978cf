"""Loading recipes: values, overrides, durations, errors that name key and line, and the frozen form."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, strategies as st

from gyre.errors import UserError
from gyre.recipe.keys import known_keys, line_of
from gyre.recipe.load import load_recipe
from gyre.recipe.schema import Recipe
from gyre.recipe.toml import dump_table, dump_toml
from gyre.recipe.units import format_seconds, parse_seconds

TERMINALBENCH = Path(__file__).parent / "designed.toml"

SMALL = """
name = "small"

[model]
path = "model"

[tasks]
path = "../tasks"
harness_timeout = "60s"
execution_timeout = "5m"
grader_timeout = 30

[group]
executions = 4
groups_per_step = 2

[train]
steps = 3

[cells]
count = 2
gpus_per_node = 0
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    folder = tmp_path / "recipes"
    (folder / "model").mkdir(parents=True)
    (tmp_path / "tasks").mkdir()
    path = folder / "small.toml"
    path.write_text(SMALL)
    return path


def refused(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_recipe(path, overrides)
    assert caught.value.code == 2
    message = str(caught.value)
    assert "\n" not in message
    return message


def edited(path: Path, old: str, new: str) -> Path:
    assert old in SMALL
    path.write_text(SMALL.replace(old, new))
    return path


def test_terminalbench_loads_as_designed() -> None:
    recipe = load_recipe(TERMINALBENCH, folders=False)
    assert recipe.harness.name == "claude-code"
    assert recipe.tasks.harness_timeout == 7200.0
    assert recipe.rollout.context == recipe.train.tokens_per_microstep == 1_048_576
    assert recipe.objective.clip == (3e-4, 4e-4)
    assert recipe.slurm.cpu.nodes == 8 and recipe.slurm.gpu.partition == "h200"
    assert recipe.slurm.signal_before_end == 600.0


def test_paths_become_absolute_from_the_recipes_folder(small: Path, tmp_path: Path) -> None:
    recipe = load_recipe(small)
    assert recipe.model.path == str(tmp_path / "recipes" / "model")
    assert recipe.tasks.path == str(tmp_path / "tasks")


def test_defaults_are_filled_in(small: Path) -> None:
    recipe = load_recipe(small)
    assert (recipe.train.steps, recipe.train.adam_betas, recipe.eval.path) == (3, (0.9, 0.95), "")


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("train.steps=7", "train.steps", 7),
        ("train.learning_rate=1", "train.learning_rate", 1.0),
        ("harness.name=codex", "harness.name", "codex"),
        ('harness.name="codex"', "harness.name", "codex"),
        ("harness.version=2.1", "harness.version", "2.1"),
        ("harness.environment.DEBUG=1", "harness.environment", {"DEBUG": "1"}),
        ("tasks.harness_timeout=1m", "tasks.harness_timeout", 60.0),
        ("objective.clip=[0.03, 0.04]", "objective.clip", (0.03, 0.04)),
        ("slurm.gpu.partition=h200", "slurm.gpu.partition", "h200"),
        ("slurm.requeue=false", "slurm.requeue", False),
        ("rollout.arguments=['--a', 'b=c']", "rollout.arguments", ["--a", "b=c"]),
    ],
)
def test_overrides(small: Path, override: str, key: str, value: object) -> None:
    found: object = load_recipe(small, [override])
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value


def test_the_last_override_of_a_key_wins(small: Path) -> None:
    assert load_recipe(small, ["train.steps=5", "train.steps=6"]).train.steps == 6


def test_an_unknown_key_is_refused_with_line_and_nearest_key(small: Path) -> None:
    message = refused(edited(small, "groups_per_step = 2", "groups_per_stop = 2"))
    assert f"{small} line 15: group.groups_per_stop: unknown key: did you mean group.groups_per_step?" == message


def test_an_unknown_key_may_belong_to_another_table(small: Path) -> None:
    assert "did you mean rollout.context?" in refused(small, "train.context=4")
    assert "did you mean train.learning_rate?" in refused(small, "objective.learning_rate=1")


def test_an_unknown_table_is_refused(small: Path) -> None:
    assert "did you mean train?" in refused(edited(small, "[train]", "[trian]"))


@pytest.mark.parametrize(
    ("old", "new", "line", "expected"),
    [
        ("steps = 3", 'steps = "3"', 18, "train.steps: expected int, got str"),
        ("steps = 3", "steps = -1", 18, "train.steps: expected int >= 0"),
        ("steps = 3", "steps = 0", 18, "train.steps: 0 steps only evaluate, and eval.path names no tasks"),
        ("[train]\nsteps = 3", "[train]", 17, "train.steps: this key is required"),
        ("grader_timeout = 30", 'grader_timeout = "half"', 11, "tasks.grader_timeout: expected seconds or"),
        ("executions = 4", "executions = 1", 14, "group.executions: expected int >= 2"),
        ("[model]", "[model]\ntemplate = 'llama'", 5, "model.template: Invalid value 'llama': use one of qwen3"),
    ],
)
def test_wrong_values_name_line_and_key(small: Path, old: str, new: str, line: int, expected: str) -> None:
    message = refused(edited(small, old, new))
    assert message.startswith(f"{small} line {line}: {expected}")


def test_a_wrong_override_says_so(small: Path) -> None:
    assert refused(small, "train.steps=many").startswith("--set: train.steps: expected int, got str")
    assert "expected key=value" in refused(small, "train.steps")
    assert "name is a value, not a table" in refused(small, "name.x=1")


def test_an_override_is_one_value_only(small: Path) -> None:
    assert load_recipe(small, ["harness.name=1\nseed = 9"]).seed == 1


def test_a_file_that_is_not_a_recipe(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    assert "cannot read the recipe" in refused(path)
    path.write_text("name = \n")
    assert "not TOML" in refused(path)
    path.write_bytes(b"name = '\xff'")
    assert "not UTF-8" in refused(path)
    path.write_text("name = 'x'\n[tasks]\npath = 't'\n[train]\nsteps = 1\n")
    assert "model: this key is required" in refused(path)


def test_missing_folders_are_named_with_their_line(small: Path) -> None:
    message = refused(edited(small, 'path = "model"', 'path = "nowhere"'))
    assert message.startswith(f"{small} line 5: model.path: {small.parent / 'nowhere'} does not exist")
    assert "eval.path" in refused(edited(small, "[group]", '[eval]\npath = "held-out"\n[group]'))
    assert load_recipe(small, folders=False).eval.path == str(small.parent / "held-out")
    assert "is not a file" in refused(small, "eval.path=", "rollout.python=model")


def test_the_frozen_recipe_is_the_recipe(tmp_path: Path) -> None:
    recipe = load_recipe(TERMINALBENCH, folders=False)
    frozen = tmp_path / "recipe.toml"
    frozen.write_text(dump_toml(recipe))
    assert load_recipe(frozen, folders=False) == recipe


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(
    environment=st.dictionaries(TEXT, TEXT, max_size=3),
    arguments=st.lists(TEXT, max_size=3),
    rate=st.floats(min_value=1e-300, max_value=1e300),
    seed=st.integers(-(2**62), 2**62),
)
def test_any_text_and_number_survives_freezing(
    environment: dict[str, str], arguments: list[str], rate: float, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    base = load_recipe(TERMINALBENCH, folders=False)
    recipe = msgspec.structs.replace(
        base,
        seed=seed,
        harness=msgspec.structs.replace(base.harness, environment=environment),
        rollout=msgspec.structs.replace(base.rollout, arguments=arguments),
        train=msgspec.structs.replace(base.train, learning_rate=rate),
    )
    frozen = tmp_path_factory.getbasetemp() / "frozen.toml"
    frozen.write_bytes(dump_toml(recipe).encode())
    assert load_recipe(frozen, folders=False) == recipe


def test_toml_has_no_null() -> None:
    with pytest.raises(TypeError):
        dump_table({"a": None})


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("10m", 600), ("2h", 7200), ("1h30m", 5400), ("1.5h", 5400), ("250ms", 0.25), ("1d", 86400), (7, 7)],
)
def test_durations(text: object, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "2 hours", "-3s", -1, "48:00:00", True, None, float("nan"), float("inf")])
def test_what_is_no_duration(text: object) -> None:
    with pytest.raises(ValueError, match="duration"):
        parse_seconds(text)


@given(st.integers(0, 10**9))
def test_durations_read_back(seconds: int) -> None:
    assert parse_seconds(format_seconds(seconds)) == seconds


def test_the_schema_knows_its_durations() -> None:
    durations = {".".join(key) for key, _, duration in known_keys(Recipe) if duration}
    assert {"tasks.harness_timeout", "slurm.signal_before_end", "local.liveness"} <= durations
    assert "rollout.temperature" not in durations


def test_lines_of_inline_and_dotted_keys() -> None:
    text = 'a.b = 1\n[slurm]\ngpu = { time = "1" }\n[slurm.cpu]\nnodes = 1\n'
    assert line_of(text, ("a", "b")) == 1
    assert line_of(text, ("slurm", "gpu", "time")) == 3
    assert line_of(text, ("slurm", "cpu", "nodes")) == 5
    assert line_of(text, ("slurm", "cpu", "mem")) == 4
    assert line_of(text, ("train",)) is None
