"""History events of Codex, Qwen Code, OpenCode and mini-swe-agent: the tree that comes of them, and what is trained."""

from __future__ import annotations

import json

import pytest

from tests.proxy.fake_harness import ChatWire, ResponsesWire, Row, call, check

MAIN, NEXT = Row("main", -1, "none"), Row("main", 0, "whole")
LS = call("Bash", command="ls", timeout=5)


def said(*calls: str, text: str = "I look.") -> str:
    return "\n".join(["hm\n</think>\n", *([text] if text else []), *calls])


@pytest.fixture
def start(worlds, renderers):
    async def make(harness, wire, **limits):
        made = wire(await worlds(renderers["thinking"], harness=harness, context=6000, **limits))
        made.user("Fix the bug.")
        return made

    return make


# -- Codex


def codex(**told) -> dict[str, str]:
    facts = {"request_kind": "turn", "thread_source": "user", "thread_id": "t-1", "window_number": 0, **told}
    return {"x-codex-turn-metadata": json.dumps(facts)}


async def test_codex_echoes_items_verbatim_through_a_sub_agent_and_a_compaction(start):
    harness = await start("codex", ResponsesWire)
    harness.headers = codex()
    answer = await harness.ask(said(call("Agent", prompt="Find the bug.")))
    agent = harness.thread(**codex(thread_source="subagent", thread_id="t-2", parent_thread_id="t-1"))
    agent.user("Find the bug.")
    inner = await agent.ask(said(LS))
    agent.results(inner, "found")
    await agent.ask(said(text="In a.py."))
    harness.results(answer, "In a.py.")
    # The same request with other metadata of the client would be a retry; this one goes on.
    answer = await harness.ask(said(LS), client_metadata={"turn": "1"})
    harness.results(answer, "ok")
    harness.user("Summarise.")
    await harness.ask(said(text="All is well."), headers=codex(request_kind="compaction"))
    harness.history = []
    harness.user("Summary: all is well.")
    harness.headers = codex(window_number=1)
    answer = await harness.ask(said(LS))
    harness.results(answer, "ok")
    await harness.ask(said(text="Done."))
    rows = check(
        harness.world,
        [
            MAIN,
            Row("sub-agent", 0, "part", "agent-t-2"),
            Row("sub-agent", 1, "whole", "agent-t-2"),
            NEXT,
            Row("main-summary", 3, "whole"),
            Row("main", 0, "part"),
            Row("main", 5, "whole"),
        ],
    )
    assert "parent_thread_id t-1" in json.loads(rows[1].evidence)["role"]
    assert "prompt of tool call call_" in json.loads(rows[1].evidence)["role"]
    assert "window_number 1" in json.loads(rows[5].evidence)["role"]


async def test_codex_keeps_the_items_that_were_complete_when_a_stream_broke(start):
    harness = await start("codex", ResponsesWire)
    harness.headers = codex()
    answer = await harness.ask(said(LS, call("Bash", command="pwd")), edit=lambda items: items[:-1])
    del answer["output"][-1]
    harness.results(answer, "ok")
    await harness.ask(said(text="Done."))
    # The second call is not in the history: the new turn keeps the tokens up to it. Both stay targets.
    rows = check(harness.world, [MAIN, Row("main", 0, "part")])
    assert len(rows[0].context) < rows[1].keep


@pytest.mark.parametrize(
    ("headers", "role", "thread"),
    [
        ({}, "main", "main"),
        ({"x-codex-turn-metadata": "{"}, "main", "main"),
        ({"x-codex-turn-metadata": "[1]", "x-openai-subagent": "review"}, "sub-agent", "agent-review"),
        ({"x-codex-parent-thread-id": "t-1"}, "sub-agent", "agent-t-1"),
        (codex(request_kind="compaction", thread_source="subagent"), "sub-agent-summary", "agent-t-1"),
        (codex(request_kind="of a future version"), "auxiliary", "main"),
    ],
)
async def test_codex_roles(start, headers, role, thread):
    harness = await start("codex", ResponsesWire)
    await harness.ask(said(LS), headers=headers)
    check(harness.world, [Row(role, -1, "none", thread)], {0: "auxiliary"} if role == "auxiliary" else {})


# -- Qwen Code


def trimmed(message):
    """Reasoning trimmed, arguments written anew."""
    calls = [
        {**c, "function": {**c["function"], "arguments": json.dumps(json.loads(c["function"]["arguments"]), indent=1)}}
        for c in message.get("tool_calls", [])
    ]
    return {**message, "reasoning_content": message["reasoning_content"].strip(), "tool_calls": calls}


async def test_qwen_code_sub_agent_summary_and_the_filler_after_compression(start):
    harness = await start("qwen-code", ChatWire)
    answer = await harness.ask("  hm \n</think>\n\n" + call("Agent", prompt="Find the bug."), trimmed)
    agent = harness.thread(system="You search.")
    agent.tools = ("Bash",)
    agent.user("Find the bug.")
    inner = await agent.ask(said(LS), trimmed)
    agent.results(inner, "found")
    await agent.ask(said(text="In a.py."))
    harness.results(answer, "In a.py.")
    answer = await harness.ask(said(LS), trimmed)
    harness.results(answer, "ok")

    summary = harness.thread(system="You summarise.")
    summary.tools = ()
    summary.history = [{"role": "user", "content": json.dumps(harness.history)}]
    await summary.ask(said(text="The bug is in a.py."))

    # Compression merges filler text into the call that it keeps, and drops its reasoning.
    message, result = harness.history[-2:]
    filled = {**message, "content": "Got it. Thanks for the summary!\n" + message["content"]}
    del filled["reasoning_content"]
    harness.history = [{"role": "user", "content": "Summary: the bug is in a.py."}, filled, result]
    answer = await harness.ask(said(LS), trimmed)
    harness.results(answer, "ok")
    # One call later the message is as it was.
    harness.history[1] = message
    await harness.ask(said(text="Done."))
    issued = harness_call(harness, 0)
    rows = check(
        harness.world,
        [
            MAIN,
            Row("sub-agent", 0, "part", f"agent-{issued}"),
            Row("sub-agent", 1, "whole", f"agent-{issued}"),
            NEXT,
            Row("main-summary", rows_parent(harness, 4), "part", "main/summary"),
            Row("main", 0, "part"),
            Row("main", 5, "whole"),
        ],
    )
    kept = rows[3].output
    assert any(rows[5].context[i : i + len(kept)] == kept for i in range(len(rows[5].context)))


def harness_call(harness, turn):
    """The id of the call that a turn issued."""
    return harness.world.capture._turns.reply(turn).calls[0].id


def rows_parent(harness, turn):
    return harness.world.sink.rows[turn].parent


async def test_qwen_code_filler_does_not_cover_another_call(start):
    harness = await start("qwen-code", ChatWire)
    answer = await harness.ask(said(LS))
    edited = json.dumps({"command": "rm", "timeout": 5})
    harness.history[-1]["tool_calls"][0]["function"]["arguments"] = edited
    harness.results(answer, "ok")
    await harness.ask(said(text="Done."))
    check(harness.world, [MAIN, Row("main", 0, "part")])


# -- OpenCode


async def test_opencode_title_sub_agent_and_a_summary_that_comes_back_as_an_answer(start):
    harness = await start("opencode", ChatWire)
    harness.headers = {"x-session-id": "ses_1"}
    title = harness.thread(system="You write titles.")
    title.tools = ()
    title.user("Fix the bug.")
    await title.ask("hm\n</think>\n\nA bug", model="tiny-small")
    answer = await harness.ask(said(call("Agent", prompt="Find the bug.")))
    agent = harness.thread(**{"x-session-id": "ses_2", "x-parent-session-id": "ses_1"})
    agent.user("Find the bug.")
    inner = await agent.ask(said(LS))
    agent.results(inner, "found")
    summary = agent.thread(system="You summarise.")
    summary.tools = ()
    summary.user("user: Find the bug. tool: found")
    await summary.ask(said(text="It is in a.py."))
    harness.results(answer, "In a.py.")
    summary = harness.thread(system="You summarise.")
    summary.tools = ()
    summary.user("user: Fix the bug. ...")
    await summary.ask(said(text="The bug is in a.py."))
    harness.history = [
        {"role": "user", "content": "What did we do so far?"},
        {"role": "assistant", "content": "The bug is in a.py."},
        {"role": "user", "content": "Go on."},
    ]
    answer = await harness.ask(said(LS))
    harness.results(answer, "ok")
    await harness.ask(said(text="Done."))
    found = harness.world.sink.rows
    check(
        harness.world,
        [
            Row("auxiliary", -1, "none", "main/title"),
            Row("main", 0, "part"),
            Row("sub-agent", 1, "part", "agent-ses_2"),
            Row("sub-agent-summary", found[3].parent, "part", "agent-ses_2/summary"),
            Row("main-summary", found[4].parent, "part", "main/summary"),
            Row("main", 1, "part"),
            Row("main", 5, "whole"),
        ],
        {0: "auxiliary"},
    )


async def test_opencode_renames_a_call_of_an_unknown_tool_and_keeps_its_id(start):
    harness = await start("opencode", ChatWire)

    def rename(message):
        for one in message["tool_calls"]:
            error = {"tool": one["function"]["name"], "error": "no such tool"}
            one["function"] = {"name": "invalid", "arguments": json.dumps(error)}
        return message

    answer = await harness.ask(said(call("Fly", to="moon")), rename)
    harness.results(answer, "The arguments are invalid.")
    await harness.ask(said(text="Done."))
    check(harness.world, [MAIN, NEXT])


# -- mini-swe-agent


async def test_mini_swe_agent_drops_a_reply_without_a_call(start):
    harness = await start("mini-swe-agent", ChatWire)
    answer = await harness.ask(said(LS))
    harness.results(answer, "ok")
    await harness.ask(said(text="I think."))
    del harness.history[-1]
    harness.user("Please call a tool.")
    answer = await harness.ask(said(LS))
    harness.results(answer, "ok")
    await harness.ask(said(text="Done."))
    check(harness.world, [MAIN, NEXT, Row("main", 1, "part"), Row("main", 2, "whole")])


# -- all of them


@pytest.mark.parametrize("wire", [ChatWire, ResponsesWire])
async def test_a_cut_reply_is_closed_and_continued(start, wire):
    harness = await start("shell", wire, max_tokens=6)
    harness.world.engine.say(said(text="one two three four five six seven"))
    harness.take(await harness.send())
    harness.user("Go on.")
    await harness.ask("x")
    rows = harness.world.sink.rows
    assert rows[0].finish == "length"
    check(harness.world, [MAIN, NEXT])
    assert rows[1].context[0] == harness.world.renderer.end_id
