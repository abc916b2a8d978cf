"""Demonstrations of the tasks' two-turn agent loop: right ones, and wrong ones of the kinds that training must unlearn.

Invariant: a demonstration is a function of the generator handed in; nothing is executed.
"""

from __future__ import annotations

import random
import re

from gyre.executions.harnesses.shell_prompt import tool_content
from recipes.tasks.generate import KINDS, TaskSpec, generate_task
from recipes.tiny_model.conversation import Message, opening, tool_call, tool_call_text

FILE = re.compile(r"\w+\.txt")
SHARES = [3 if kind == "create" else 1 for kind in KINDS]
"""How often each kind is shown: copying any of 38 words takes longer to learn than the rest together."""
FINAL = {"role": "assistant", "content": "done"}


def demonstration(rng: random.Random, right: bool) -> list[Message]:
    """A whole conversation about a random task."""
    task = generate_task(rng, rng.choices(KINDS, SHARES)[0])
    if right:
        return conversation(task, task.command)
    draw = rng.random()
    if draw < 0.50:
        return conversation(task, command_of_another_task(task, rng))
    if draw < 0.97:
        return conversation(task, files_of_another_task(task, rng))
    return [*opening(task.instruction), {"role": "assistant", "content": malformed(task.command)}]


def conversation(task: TaskSpec, command: str) -> list[Message]:
    """`command` is called, its result is read, and the task is said to be done."""
    result = {"role": "tool", "content": result_of(task, command)}
    return [*opening(task.instruction), tool_call(command), result, FINAL]


def command_of_another_task(task: TaskSpec, rng: random.Random) -> str:
    """The wrong command on the right files."""
    other = generate_task(rng)
    names = {other.output: task.output, **dict(zip(other.files, task.files, strict=False))}
    return FILE.sub(lambda name: names.get(name[0], name[0]), other.command)


def files_of_another_task(task: TaskSpec, rng: random.Random) -> str:
    """The right command on files that were not asked for."""
    other = generate_task(rng)
    names = {task.output: other.output, **dict(zip(task.files, other.files, strict=False))}
    return FILE.sub(lambda name: names.get(name[0], name[0]), task.command)


def malformed(command: str) -> str:
    """A call whose arguments are not an object: the proxy leaves it as text, and the harness stops there."""
    return tool_call_text(command).replace('"arguments": {"command": ', '"command": ').replace("}}", "}")


def result_of(task: TaskSpec, command: str) -> str:
    """What bash would answer: nothing but "ok", unless a file that is read is missing."""
    read = [name for name in FILE.findall(command) if f"> {name}" not in command]
    missing = [name for name in read if name not in task.files]
    if not missing:
        return tool_content("", 0)
    program = command.split()[0]
    if program == "sort":
        return tool_content(f"sort: cannot read: {missing[0]}: No such file or directory\n", 2)
    if program == "head":
        return tool_content(f"head: cannot open '{missing[0]}' for reading: No such file or directory\n", 1)
    return tool_content(f"bash: line 1: {missing[0]}: No such file or directory\n", 1)
