"""What the tiny model is warmed on is, token for token, what the proxy sends for the `shell` harness."""

from __future__ import annotations

from tokenizers import Tokenizer

from gyre.executions.harnesses.shell_prompt import TOOL
from recipes.tiny_model.conversation import encode, opening, tool_call, tool_call_text


async def test_the_proxy_sends_what_the_warm_start_teaches(world, folders):
    command = "sed -i 's/a/\"b\"/' x.txt && echo é"
    asked = opening("Replace a in x.txt.")
    result = {"role": "tool", "content": "ok"}
    done = {"role": "assistant", "content": "done"}
    ids, targets = encode(
        Tokenizer.from_file(str(folders["tiny"] / "tokenizer.json")), [*asked, tool_call(command), result, done]
    )

    world.engine.say(tool_call_text(command))
    world.engine.say("done")
    _, answer = await world.post({"messages": asked, "tools": [TOOL]})
    message = answer["choices"][0]["message"]
    result["tool_call_id"] = message["tool_calls"][0]["id"]
    await world.post({"messages": [*asked, message, result], "tools": [TOOL]})
    assert world.whole(1) == ids
    sampled = [token for row in world.sink.rows for token in row.output]
    assert sampled == [token for token, target in zip(ids, targets, strict=True) if target]
