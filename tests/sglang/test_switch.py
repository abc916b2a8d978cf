"""A switch in the middle of streaming calls: every caller gets its whole reply, every token with its version."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest

from gyre.engines.push import push_weights
from gyre.proxy.generate import Sampled
from tests.engines.place import Oracle
from tests.sglang.server import Server
from tests.sglang.switch import Switch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CALLS = 16
TOKENS = 600
FIRST, SECOND = "1.1-aaaa", "1.2-bbbb"


def test_a_cell_leaves_in_the_middle_of_sixteen_calls(
    server: Server, second: Server, oracle: Oracle, other_oracle: Oracle
) -> None:
    prompts = [[number + 1, 7, 8, 9] for number in range(CALLS)]

    async def work() -> list[Sampled]:
        async with aiohttp.ClientSession() as session:
            switch = Switch(server.place, second.place, session, FIRST, SECOND)
            await push_weights(switch.leaves, oracle.named(), FIRST, 1 << 20)
            await push_weights(switch.stays, other_oracle.named(), SECOND, 1 << 20, tensor_parallel=2)
            await switch.leave_in_the_middle(prompts, TOKENS)
            await push_weights(switch.leaves, oracle.named(), "restored", 1 << 20)
            return switch.into

    done = asyncio.run(work())
    for prompt, one in zip(prompts, done, strict=True):
        assert (one.finish, len(one.output), one.cell) == ("length", TOKENS, "stays")
        assert sum(span.length for span in one.spans) == TOKENS
        first = sum(span.length for span in one.spans if span.version == 1)
        ours, theirs = (found.logprobs(prompt, list(one.output)) for found in (oracle, other_oracle))
        assert list(one.logprobs) == pytest.approx(ours[:first] + theirs[first:], abs=1e-4)
    assert all([span.version for span in one.spans] == [1, 2] for one in done), "it came in the middle of each call"


def test_no_key_is_in_the_log_or_told(server: Server) -> None:
    keys = json.loads(server.launch.key_file.read_text())
    log = server.log.read_text(errors="replace")
    info = json.dumps(server.place.drive(lambda client: client.server_info()))
    for key in keys.values():
        assert key not in log
        assert key not in info
