"""`gyre doctor engine`, against a good engine, a locked one, none, and one that reports other log-probabilities."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from gyre.engines.client import EngineClient
from gyre.engines.types import GenerateRequest, Generation
from gyre.launch import engine_doctor

from .place import Place


def doctor(url: str, *more: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "gyre.cli.main", "doctor", "engine", url, *more]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def test_a_good_engine(place: Place, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(json.dumps({"api_key": place.api_key, "admin_key": place.admin_key}))
    done = doctor(place.url, "--key-file", str(keys))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 6
    assert all(line.startswith("ok ") for line in lines), done.stdout


def test_without_keys_it_says_so(place: Place) -> None:
    done = doctor(place.url)
    assert done.returncode == 1
    assert "--key-file" in done.stdout


def test_nothing_there_and_wrong_use() -> None:
    done = doctor("http://127.0.0.1:9")
    assert (done.returncode, done.stderr) == (1, "")
    assert "start the server first" in done.stdout
    assert doctor("http://127.0.0.1:9", "--template", "no").returncode == 2


@pytest.mark.parametrize("template", sorted(engine_doctor.REPLIES))
def test_each_family_reads_its_own_call(template: str) -> None:
    assert engine_doctor.parser(template).verdict == "ok"


class Unscaled(EngineClient):
    """Reports log-probabilities of the distribution at T = 1, whatever the temperature."""

    async def generate_once(self, request: GenerateRequest) -> Generation:
        got = await super().generate_once(request)
        scores = await self.score(request.input_ids + got.output_ids)
        got.logprobs = scores[len(request.input_ids) - 1 :]
        return got


def test_log_probabilities_before_the_temperature_are_a_failure(place: Place) -> None:
    async def ask() -> str:
        async with aiohttp.ClientSession() as session:
            found = Unscaled(place.url, session, place.api_key, place.admin_key)
            return (await engine_doctor.temperatures(found)).verdict

    assert asyncio.run(ask()) == "failure"
