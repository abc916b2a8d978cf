"""What paced engines and trainers go by: times, and the script of every execution.

Owns the file `pace.json` of an emulated run and the folder of claims. Invariants: times are those of the workload over
the speed factor; each of a group's jobs is claimed by one of its executions (by exclusive creation of a file),
whichever cell serves it; all that an engine knows of an execution it reads in the prompt, so any cell can go on.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenizers import Tokenizer

FILE = "pace.json"
CLAIMS = "claims"
HEADER = re.compile(r"job (\S+) (\d+) turn (\d+)/(\d+)")
TASK = re.compile(r"Pace (\S+)\.")
OPENING = "<|im_start|>assistant"
ENDING = "<|im_end|>"
FILLER = "~"


@dataclass(frozen=True)
class Pace:
    """Seconds, already divided by the speed factor. `jobs`: for each task, the seconds of its executions."""

    to_training: float
    to_rollout: float
    refresh: float
    optimizer: float
    merge: float
    token: float
    """Training of one token."""
    turns: int
    generation: float
    """The part of an execution's time that generates."""
    fillers: int
    """Tokens of a call that stand for its time."""
    jobs: dict[str, list[float]]

    def write(self, run: Path) -> None:
        (run / CLAIMS).mkdir()
        (run / FILE).write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, run: Path) -> Pace:
        return cls(**json.loads((run / FILE).read_text()))


@dataclass(frozen=True)
class Answer:
    """What is still to be said in a call: `head` at once, `fillers` in `seconds`, then `tail`."""

    head: list[int]
    fillers: list[int]
    tail: list[int]
    seconds: float

    def after(self, share: float) -> list[int]:
        """The tokens there are when a share of the time has passed."""
        if share >= 1.0:
            return self.head + self.fillers + self.tail
        return self.head + self.fillers[: int(share * len(self.fillers))]


class Script:
    """Answers to prompts, of one run."""

    def __init__(self, run: Path, pace: Pace, tokenizer: Tokenizer) -> None:
        self._claims, self._pace, self._tokenizer = run / CLAIMS, pace, tokenizer
        self._filler = self._ids(FILLER)[0]
        self.ending = self._ids(ENDING)[0]

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def answer(self, prompt: list[int]) -> Answer:
        """Raises ValueError for a prompt that is no emulated execution's."""
        text = self._tokenizer.decode(prompt, skip_special_tokens=False)
        before, _, open_turn = text.rpartition(OPENING)
        begun = HEADER.search(open_turn)
        if begun is not None:
            return self._rest(begun[1], int(begun[2]), int(begun[3]), open_turn.count(FILLER), [])
        headers = HEADER.findall(before)
        if headers:
            task, index, turn, _ = headers[-1]
            return self._turn(task, int(index), int(turn) + 1)
        asked = TASK.search(text)
        if asked is None:
            raise ValueError("a prompt without a paced task")
        return self._turn(asked[1], self._claim(asked[1]), 1)

    def _turn(self, task: str, index: int, turn: int) -> Answer:
        head = self._ids(f"job {task} {index} turn {turn}/{self._pace.turns} ")
        return self._rest(task, index, turn, 0, head)

    def _rest(self, task: str, index: int, turn: int, said: int, head: list[int]) -> Answer:
        pace = self._pace
        seconds = pace.jobs[task][index]
        left = max(0, pace.fillers - said)
        generation = seconds * pace.generation / pace.turns
        tail = ENDING
        if turn < pace.turns:
            tool = seconds * (1.0 - pace.generation) / (pace.turns - 1)
            call = {"name": "bash", "arguments": {"command": f"echo {index} > job; sleep {tool:.3f}"}}
            tail = f"\n<tool_call>\n{json.dumps(call)}\n</tool_call>{ENDING}"
        return Answer(head, [self._filler] * left, self._ids(tail), generation * left / pace.fillers)

    def _claim(self, task: str) -> int:
        """The first of a task's jobs that nobody has; when all are taken (an attempt was lost) they begin again."""
        for index in range(len(self._pace.jobs[task])):
            try:
                os.close(os.open(self._claims / f"{task}.{index}", os.O_CREAT | os.O_EXCL, 0o600))
            except FileExistsError:
                continue
            return index
        return 0
