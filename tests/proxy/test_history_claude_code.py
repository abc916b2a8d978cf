"""Claude Code's history events: what it sends next, what the tree looks like, what is trained."""

from __future__ import annotations

import asyncio
import json

import pytest

from gyre.proxy.harness_rules.claude_code import SUMMARY_MARKER
from tests.proxy.fake_harness import MessagesWire, Row, call, check

SESSION = {"x-claude-code-session-id": "s-1"}
MAIN, NEXT = Row("main", -1, "none"), Row("main", 0, "whole")


@pytest.fixture
async def harness(worlds, renderers):
    wire = MessagesWire(await worlds(renderers["thinking"], harness="claude-code", context=6000))
    wire.headers = dict(SESSION)
    wire.user("Fix the bug.")
    return wire


def said(*calls: str, text: str = "I look.") -> str:
    return "\n".join(["hm\n</think>\n", *([text] if text else []), *calls])


def blocks_of(kind, change):
    """An edit of the blocks of one kind."""
    return lambda blocks: [change(block) if block["type"] == kind else block for block in blocks]


def inputs(change):
    return blocks_of("tool_use", lambda block: {**block, "input": change(block["input"])})


def drop_blank(blocks):
    return [b for b in blocks if b["type"] != "text" or b["text"].strip()]


BASH = call("Bash", command="cd /app && cd 'a b' && make  test", timeout=1000.0, background="false")
WRITE = call("Write", file_path="/app/a.py", content="def f():  \n    return 1\t\n", n=3)
ECHOES = {
    "verbatim": (said(BASH), None),
    "keys re-ordered": (said(BASH), inputs(lambda given: dict(reversed(given.items())))),
    "values coerced": (said(BASH), inputs(lambda given: {**given, "timeout": 1000, "background": False})),
    "leading cd stripped": (said(BASH), inputs(lambda given: {**given, "command": "make  test"})),
    "first cd stripped": (said(BASH), inputs(lambda given: {**given, "command": "cd 'a b' && make  test"})),
    "line ends stripped": (said(WRITE), inputs(lambda given: {**given, "content": "def f():\n    return 1\n"})),
    "white-space text dropped": (said(BASH, text="\n \n"), drop_blank),
    "text moved before the call": (said(BASH, "Then I go on.", text=""), None),
    "unparsed input": (said(BASH), inputs(lambda given: {"__unparsedToolInput": json.dumps(given)[:-1]})),
    "thinking dropped": (said(BASH), lambda blocks: [b for b in blocks if b["type"] != "thinking"]),
}


@pytest.mark.parametrize("name", ECHOES)
async def test_edits_that_it_makes_are_seen_through(harness, name):
    text, edit = ECHOES[name]
    answer = await harness.ask(text, edit)
    harness.results(answer, "ok")
    await harness.ask(said(text="Done."))
    check(harness.world, [MAIN, NEXT])


@pytest.mark.parametrize(
    ("text", "edit"),
    [
        (said(BASH), inputs(lambda given: {**given, "command": "rm -r /"})),
        (said(WRITE), inputs(lambda given: {**given, "content": "def f():\n  return 1\n"})),
        (said(WRITE), inputs(lambda given: {**given, "n": 4})),
        (said(BASH), blocks_of("text", lambda block: {**block, "text": "I looked."})),
    ],
)
async def test_other_edits_fork(harness, text, edit):
    answer = await harness.ask(text, edit)
    harness.results(answer, "ok")
    await harness.ask(said(text="Done."))
    check(harness.world, [MAIN, Row("main", 0, "part")])


async def test_cache_marks_move_and_text_becomes_blocks(harness):
    for _ in range(3):
        last = harness.history[-1]
        content = [{"type": "text", "text": last["content"]}] if isinstance(last["content"], str) else last["content"]
        harness.history[-1] = {
            **last,
            "content": [*content[:-1], {**content[-1], "cache_control": {"type": "ephemeral"}}],
        }
        answer = await harness.ask(said(BASH))
        for block in harness.history[-2]["content"]:
            block.pop("cache_control", None)
        harness.results(answer, "ok")
    check(harness.world, [MAIN, NEXT, Row("main", 1, "whole")])


async def test_parallel_results_in_completion_order(harness):
    answer = await harness.ask(said(call("Bash", command="sleep 1"), call("Bash", command="true")))
    harness.results(answer, "slow", "quick", order=-1)
    answer = await harness.ask(said(BASH))
    harness.results(answer, "ok")
    await harness.ask(said(text="Done."))
    rows = check(harness.world, [MAIN, NEXT, Row("main", 1, "whole")])
    text = harness.world.renderer.decode(rows[1].context)
    assert text.index("slow") < text.index("quick")


async def test_system_messages_inside_the_history(harness):
    harness.history.append({"role": "system", "content": "Mind the budget."})
    answer = await harness.ask(said(BASH))
    harness.results(answer, "ok", extra="A reminder.")
    harness.history.append({"role": "system", "content": "Mind the budget more."})
    await harness.ask(said(text="Done."))
    check(harness.world, [MAIN, NEXT])


@pytest.mark.parametrize("empty", ["hm\n</think>\n\n", "\n</think>\n\n"])
async def test_a_turn_without_words_is_dropped_and_text_joins_the_users_message(harness, empty):
    answer = await harness.ask(said(BASH))
    harness.results(answer, "ok")
    await harness.ask(empty)
    del harness.history[-1]
    harness.history[-1]["content"].append({"type": "text", "text": "Please go on."})
    await harness.ask(said(text="Done."))
    # The dropped turn stays the tip of a leaf of its own; its sibling shares all that was before it.
    rows = check(harness.world, [MAIN, NEXT, Row("main", 1, "part")])
    assert rows[2].keep > len(harness.world.whole(0))


async def test_compaction_after_the_error_with_rounds_kept(worlds, renderers):
    world = await worlds(renderers["thinking"], harness="claude-code", context=700)
    harness = MessagesWire(world)
    harness.headers = dict(SESSION)
    harness.user("Fix the bug.")
    first = await harness.ask(said(BASH))
    harness.results(first, "ok")
    second = await harness.ask(said(WRITE))
    harness.results(second, "x" * 2000)
    answer = await harness.send(status=400)
    assert answer["error"]["message"].startswith("prompt is too long: ")
    kept = [harness.history[3], {**harness.history[4]}]
    kept[1]["content"] = [{**kept[1]["content"][0], "content": "[cut]"}]
    del harness.history[3:]
    summarise = {"type": "text", "text": f"{SUMMARY_MARKER}. Summarise."}
    harness.history[2]["content"].append(summarise)
    harness.history.append({"role": "system", "content": "Mind the budget."})
    await harness.ask(said(text="The bug is in a.py."))
    harness.history = [{"role": "user", "content": "Summary: the bug is in a.py."}, *kept]
    third = await harness.ask(said(BASH))
    harness.results(third, "ok")
    await harness.ask(said(text="Done."))
    rows = check(
        world,
        [MAIN, NEXT, Row("main-summary", 1, "part"), Row("main", 0, "part"), Row("main", 3, "whole")],
    )
    # The kept round is context of the new segment, with the tokens as they were sampled.
    context = rows[3].context
    assert any(context[i : i + len(rows[1].output)] == rows[1].output for i in range(len(context)))
    assert json.loads(rows[2].evidence)["role"] == "summary marker; session s-1"


async def test_a_summary_that_calls_a_tool_is_asked_for_again(harness):
    answer = await harness.ask(said(BASH))
    harness.results(answer, "ok", extra=f"{SUMMARY_MARKER}. Summarise.")
    await harness.ask(said(BASH))
    del harness.history[-1]
    await harness.ask(said(text="All is well."))
    check(harness.world, [MAIN, Row("main-summary", 0, "whole"), Row("main-summary", 1, "part")])


async def test_a_sub_agent_its_summary_and_its_resumption(harness):
    answer = await harness.ask(said(call("Agent", prompt="Find the bug.", description="find")))
    agent = harness.thread(**{"x-claude-code-agent-id": "a7"})
    agent.system, agent.tools = "You search.", ("Bash",)
    agent.history.append(
        {"role": "user", "content": [{"type": "text", "text": "<reminder>"}, {"type": "text", "text": "Find the bug."}]}
    )
    inner = await agent.ask(said(BASH))
    agent.results(inner, "found", extra=f"{SUMMARY_MARKER}. Summarise.")
    await agent.ask(said(text="In a.py."))
    # A message to the finished agent: the same id, other tools, its old turns are missing.
    again = harness.thread(**{"x-claude-code-agent-id": "a7"})
    again.system, again.tools = "You search.", ("Bash", "Write")
    again.user("And in b.py?")
    await again.ask(said(text="No."))
    harness.results(answer, "In a.py.")
    await harness.ask(said(text="Done."))
    rows = check(
        harness.world,
        [
            MAIN,
            Row("sub-agent", 0, "part", "agent-a7"),
            Row("sub-agent-summary", 1, "whole", "agent-a7"),
            Row("sub-agent", 1, "part", "agent-a7"),
            NEXT,
        ],
    )
    issued = next(block["id"] for block in answer["content"] if block["type"] == "tool_use")
    assert f"prompt of tool call {issued}" in rows[1].evidence
    assert "prompt of tool call" not in rows[3].evidence


async def test_side_calls_are_auxiliary_and_never_trained(harness):
    answer = await harness.ask(said(BASH))
    helper = harness.thread()
    helper.user("Perform a web search for: x")
    tool = {"type": "web_search_20250305", "name": "web_search"}
    await helper.ask("I cannot.", tools=[tool], tool_choice={"type": "tool", "name": "web_search"})
    title = harness.thread(system="Title please.")
    title.tools = ()
    title.user("Fix the bug.")
    await title.ask("A bug", output_config={"format": {"type": "json_schema", "schema": {}}})
    harness.results(answer, "ok")
    await harness.ask(said(text="Done."))
    side = "main/auxiliary"
    rows = [MAIN, Row("auxiliary", 0, "part", side), Row("auxiliary", 0, "part", side), NEXT]
    assert len(harness.world.sink.rows) == 4
    check(harness.world, rows, {1: "auxiliary", 2: "auxiliary"})


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_left_and_its_byte_identical_retry_are_one_turn(harness, stream):
    gate = asyncio.Event()
    harness.world.engine.say(said(BASH), gate=gate)
    leaving = asyncio.ensure_future(harness.send(stream=stream))
    await harness.world.engine.started.wait()
    leaving.cancel()
    await asyncio.wait({leaving})
    gate.set()
    async with asyncio.timeout(10):
        while len(harness.world.sink.rows) < 2:
            await asyncio.sleep(0.005)
    assert [row.status for row in harness.world.sink.rows] == ["committed", "undelivered"]
    answer = await harness.send(stream=False)
    if stream:
        # Another way of delivery is another request: it samples a sibling.
        assert harness.world.capture.stats.replayed == 0
        harness.take(answer)
        check(harness.world, [MAIN, Row("main", 0, "part")], {0: "undelivered"})
        return
    assert harness.world.capture.stats.replayed == 1
    harness.take(answer)
    harness.results(answer, "ok")
    await harness.ask(said(text="Done."))
    check(harness.world, [MAIN, NEXT])


async def test_compaction_of_a_sub_agent(harness):
    await harness.ask(said(call("Agent", prompt="Find the bug.")))
    agent = harness.thread(**{"x-claude-code-agent-id": "a7"})
    agent.system = "You search."
    agent.user("Find the bug.")
    inner = await agent.ask(said(BASH))
    agent.results(inner, "found")
    kept = agent.history[-2:]
    agent.history = [*agent.history[:1], {"role": "user", "content": f"{SUMMARY_MARKER}. Summarise."}]
    await agent.ask(said(text="All is known."))
    agent.history = [{"role": "user", "content": "Summary: all is known."}, *kept]
    inner = await agent.ask(said(WRITE))
    agent.results(inner, "ok")
    await agent.ask(said(text="In a.py."))
    thread = "agent-a7"
    rows = check(
        harness.world,
        [
            MAIN,
            Row("sub-agent", 0, "part", thread),
            Row("sub-agent-summary", 1, "part", thread),
            Row("sub-agent", 1, "part", thread),
            Row("sub-agent", 3, "whole", thread),
        ],
    )
    assert any(rows[3].context[i : i + len(rows[1].output)] == rows[1].output for i in range(len(rows[3].context)))


async def test_an_over_long_prompt_changes_nothing(harness):
    answer = await harness.ask(said(BASH))
    harness.results(answer, "y" * 20_000)
    await harness.send(status=400)
    harness.history[-1]["content"][0]["content"] = "y"
    await harness.ask(said(text="Done."))
    check(harness.world, [MAIN, NEXT])
    assert harness.world.capture.stats.server_errors == 0


@pytest.mark.parametrize(
    ("kind", "agent", "role", "thread"),
    [
        ("main", "", "main", "main"),
        ("compaction", "", "main-summary", "main"),
        ("subagent", "a1", "sub-agent", "agent-a1"),
        ("workflow", "a1", "sub-agent", "agent-a1"),
        ("compaction", "a1", "sub-agent-summary", "agent-a1"),
        ("auxiliary", "", "auxiliary", "main/auxiliary"),
        ("of a future version", "", "main", "main"),
    ],
)
async def test_class_headers_of_newer_versions(harness, kind, agent, role, thread):
    headers = {"x-claude-code-request-class": kind, **({"x-claude-code-agent-id": agent} if agent else {})}
    await harness.ask(said(BASH), headers=headers)
    check(harness.world, [Row(role, -1, "none", thread)], {0: "auxiliary"} if role == "auxiliary" else {})
