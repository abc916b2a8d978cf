"""The template family's rules against whole templates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gyre.errors import UserError
from gyre.proxy.conversation import Message
from gyre.proxy.template import load
from gyre.proxy.verify import verify_template


@pytest.mark.parametrize("name", ["tiny", "hybrid", "thinking"])
def test_tail_rendering_equals_the_full_template(folders, name):
    report = verify_template(folders[name])
    assert report.ok, "\n".join(report.lines())
    assert len(report.checked) == 9


@pytest.mark.parametrize(
    ("name", "family", "skipped"), [("coder", "qwen3-coder", 0), ("qwen3.5", "qwen3.5", 0), ("llama", "llama3", 1)]
)
def test_other_families_extend_turn_by_turn(folders, name, family, skipped):
    report = verify_template(folders[name], family)
    assert report.ok, "\n".join(report.lines())
    assert len(report.checked) == 9 - skipped
    assert sum("one call a turn" in note for note in report.notes) == skipped


def test_the_wrong_family_is_found_out(folders):
    assert not verify_template(folders["coder"], "qwen3").ok
    assert not verify_template(folders["tiny"], "qwen3-coder").ok
    assert not verify_template(folders["tiny"], "llama3").ok


def test_notes_where_old_turns_are_rewritten(folders):
    assert verify_template(folders["tiny"]).notes == ()
    noted = [note.partition(":")[0] for note in verify_template(folders["thinking"]).notes]
    assert "system" in noted
    assert "thinking" not in noted


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        (
            '"<|im_start|>" ~ message.role ~ "\\n"',
            '"<|im_start|>" ~ message.role ~ loop.index',
            "tail rendering leaves",
        ),
        ('"arguments": ', '"parameters": ', "the parser reads back something else"),
        ("{{- said -}}", "{{- said | upper -}}", "the template refuses it"),
    ],
)
def test_a_template_that_breaks_a_rule_is_reported(folders, tmp_path, old, new, what):
    template = (folders["tiny"] / "chat_template.jinja").read_text()
    assert old in template
    (tmp_path / "tokenizer.json").write_bytes((folders["tiny"] / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text(template.replace(old, new))
    report = verify_template(tmp_path)
    assert not report.ok
    assert any(difference.what.startswith(what) for difference in report.differences)
    assert any(what in line for line in report.lines())


def test_closing_of_a_cut_turn(renderer):
    user = Message(role="user", text="go on")
    stopped = renderer.tail([user], {}, renderer.end_id)
    cut = renderer.tail([user], {}, renderer.encode("x")[0])
    assert cut == [renderer.end_id, *stopped]
    assert renderer.decode(stopped) == "\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"


def test_template_from_tokenizer_config(folders, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((folders["tiny"] / "tokenizer.json").read_bytes())
    template = (folders["tiny"] / "chat_template.jinja").read_text()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert load(tmp_path, "qwen3").generation == "<|im_start|>assistant\n"


def test_user_errors(folders, tmp_path: Path):
    with pytest.raises(UserError, match="tokenizer.json does not exist"):
        load(tmp_path, "qwen3")
    with pytest.raises(UserError, match=r"model.template: 'llama9' is not a known template family"):
        load(folders["tiny"], "llama9")
    (tmp_path / "tokenizer.json").write_bytes((folders["tiny"] / "tokenizer.json").read_bytes())
    with pytest.raises(UserError, match="has no chat template"):
        load(tmp_path, "qwen3")
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(UserError, match="is not valid"):
        load(tmp_path, "qwen3")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        load(tmp_path, "qwen3")
