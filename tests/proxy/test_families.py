"""Every template family through the proxy: a call, its result, an answer; the tokens stay as they were sampled."""

from __future__ import annotations

import pytest

from tests.proxy.fake_harness import MessagesWire, Row, check

XML = (
    "<tool_call>\n<function=Bash>\n<parameter=command>\n  ls\n</parameter>\n<parameter=n>\n5\n</parameter>\n"
    "</function>\n</tool_call>"
)
SAID = {
    "coder": "I look.\n" + XML,
    "qwen3.5": "hm\n</think>\n\nI look.\n" + XML,
    "llama": '{"name": "Bash", "parameters": {"command": "  ls", "n": 5}}',
}
RESULT = {
    "coder": "\n<|im_start|>user\n<tool_response>\nok\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    "qwen3.5": "\n<|im_start|>user\n<tool_response>\nok\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n",
    "llama": '<|start_header_id|>ipython<|end_header_id|>\n\n"ok"<|eot_id|>'
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
}


@pytest.mark.parametrize("model", SAID)
async def test_a_call_and_its_result(worlds, renderers, model):
    world = await worlds(renderers[model])
    harness = MessagesWire(world)
    harness.user("List the files.")
    answer = await harness.ask(SAID[model])
    (used,) = [block for block in answer["content"] if block["type"] == "tool_use"]
    assert (used["name"], used["input"]) == ("Bash", {"command": "  ls", "n": 5})
    # The harness writes the arguments in another order: the recorded tokens stand for them.
    harness.history[-1]["content"][-1]["input"] = dict(reversed(used["input"].items()))
    harness.results(answer, "ok")
    await harness.ask("Done.")
    rows = check(world, [Row("main", -1, "none"), Row("main", 0, "whole")])
    assert world.renderer.decode(rows[0].output).startswith(SAID[model])
    assert world.renderer.decode(rows[1].context) == RESULT[model]


@pytest.mark.parametrize("model", SAID)
async def test_recorded_turns_are_spliced_into_a_new_root(worlds, renderers, model):
    world = await worlds(renderers[model])
    harness = MessagesWire(world)
    harness.user("List the files.")
    answer = await harness.ask(SAID[model])
    kept = harness.history[-1]
    harness.history = [{"role": "user", "content": "Summary."}, kept]
    harness.results(answer, "ok")
    await harness.ask("Done.")
    rows = check(world, [Row("main", -1, "none"), Row("main", 0, "part")])
    output = rows[0].output
    assert any(rows[1].context[i : i + len(output)] == output for i in range(len(rows[1].context)))
    assert answer["stop_reason"] == "tool_use"
