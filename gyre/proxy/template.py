"""A model's chat template and tokenizer: conversation in, token ids out, without transformers.

Owns rendering. Invariant: recorded tokens are never tokenised again; a tail costs what it holds, not what
lies before it; and every piece that is tokenised by itself begins or ends at a special token, so pieces and
whole give the same ids.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
from tokenizers import Tokenizer

from gyre.errors import UserError
from gyre.proxy.conversation import Conversation, Message, Tool
from gyre.proxy.families import Family, family
from gyre.proxy.parser import Parsed

Recorded = Mapping[int, Sequence[int]]
"""Message index -> the output tokens that were sampled for that assistant message."""


class RenderError(Exception):
    """The template refused the conversation: the harness sent something that the model's format has no place
    for.
    """


class Renderer:
    """Renders for one model. `stop_ids` end a turn; `generation` is the text that opens an assistant's turn."""

    def __init__(self, tokenizer: Tokenizer, template: str, rules: Family, nonce: str) -> None:
        """`nonce` marks the places of recorded tokens: no text of a harness or a model may hold it."""
        self.rules = rules
        self._nonce = nonce
        self._tokenizer = tokenizer
        self._template = _environment().from_string(template)
        self.end_id = self._id(rules.end_of_turn)
        for text in rules.required:
            self._id(text)
        others = [tokenizer.token_to_id(text) for text in rules.other_stops]
        self.stop_ids = (self.end_id, *(i for i in others if i is not None))
        self.generation = self._generation()
        self.thinking_open = self.generation.rstrip().endswith("<think>")

    def root(self, conversation: Conversation, recorded: Recorded) -> list[int]:
        """Ids of the whole conversation up to where the assistant goes on, recorded tokens in their places."""
        offset = 0 if conversation.system is None else 1
        marks = self._marks(recorded)
        messages = self.rules.messages(conversation)
        for index, mark in marks.items():
            messages[index + offset] = self.rules.placeholder(mark)
        text = self.text(messages, conversation.tools)
        return self._splice(text, 0, marks, recorded)

    def tail(self, messages: Sequence[Message], recorded: Recorded, last_id: int) -> list[int]:
        """Ids that follow a sampled turn whose last output token is `last_id`, up to where the assistant goes
        on.

        `recorded` counts from the first of `messages`. A turn that was cut is closed first.
        """
        marks = self._marks(recorded)
        prefix_mark = self._mark("before")
        rendered = self.rules.dummy_prefix(prefix_mark)
        for index, message in enumerate(messages):
            rendered.append(self.rules.placeholder(marks[index]) if index in marks else self.rules.message(message))
        text = self.text(rendered, ())
        start = self.rules.region(text, prefix_mark)[1]
        closing = [] if last_id == self.end_id else [self.end_id]
        return closing + self._splice(text, start, marks, recorded)

    def text(self, messages: list[dict[str, Any]], tools: Sequence[Tool], generate: bool = True) -> str:
        """The template's text. Raises RenderError if the template refuses the messages."""
        specs = [tool.spec for tool in tools] or None
        try:
            return self._template.render(
                messages=messages, tools=specs, add_generation_prompt=generate, bos_token=self.rules.begin
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise RenderError(f"the model's chat template refuses this conversation: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Ids of template text; markers in it become their tokens."""
        # Lone surrogates (JSON escapes can carry them) have no UTF-8 form.
        clean = text.encode("utf-8", "replace").decode("utf-8")
        # A batch of one: this way the tokenizer keeps no account of where in the text each token lies.
        return list(self._tokenizer.encode_batch_fast([clean], add_special_tokens=False)[0].ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of sampled ids, markers included."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def parse(self, output: Sequence[int], tools: Sequence[Tool] = ()) -> Parsed:
        """What sampled ids say, their stop token left out."""
        return self.rules.parse(self.decode(self.unstopped(output)), self.thinking_open, tools)

    def unstopped(self, output: Sequence[int]) -> Sequence[int]:
        """`output` without the stop token that it may end with."""
        return output[:-1] if len(output) and output[-1] in self.stop_ids else output

    # -- splicing

    def _splice(self, text: str, at: int, marks: dict[int, str], recorded: Recorded) -> list[int]:
        ids: list[int] = []
        for index, mark in marks.items():
            start, end = self.rules.region(text, mark)
            ids += self.encode(text[at:start] + self.generation)
            output = recorded[index]
            ids += output
            if not len(output) or output[-1] != self.end_id:
                ids.append(self.end_id)
            at = end
        return ids + self.encode(text[at:])

    def _marks(self, recorded: Recorded) -> dict[int, str]:
        return {index: self._mark(str(index)) for index in sorted(recorded)}

    def _mark(self, place: str) -> str:
        return f"[{self._nonce}:{place}]"

    def _generation(self) -> str:
        messages = [{"role": "user", "content": "-"}]
        bare, opened = self.text(messages, (), generate=False), self.text(messages, ())
        if not opened.startswith(bare) or opened == bare:
            raise UserError("the chat template adds no generation prompt: run `gyre doctor template` on the model")
        return opened[len(bare) :]

    def _id(self, text: str) -> int:
        found = self._tokenizer.token_to_id(text)
        if found is None:
            raise UserError(f"the tokenizer has no token {text!r}, which the {self.rules.name} template needs")
        return int(found)


def load(model_dir: str | Path, family_name: str, nonce: str | None = None) -> Renderer:
    """The renderer of a Hugging Face folder. Raises UserError that names the missing or unreadable file."""
    folder = Path(model_dir)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UserError(f"model.path: {path} does not exist")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    # `tokenizers` raises bare Exception for a file that it cannot read.
    except Exception as error:
        raise UserError(f"model.path: {path} cannot be read: {error}") from error
    try:
        return Renderer(tokenizer, _template_text(folder), family(family_name), nonce or secrets.token_hex(8))
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"model.path: the chat template in {folder} is not valid: {error}") from error
    except RenderError as error:
        raise UserError(f"model.path: {folder}: {error}") from error


def _template_text(folder: Path) -> str:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    config = folder / "tokenizer_config.json"
    if config.is_file():
        try:
            found = json.loads(config.read_text(encoding="utf-8")).get("chat_template")
        except ValueError as error:
            raise UserError(f"model.path: {config} is not JSON: {error}") from error
        if isinstance(found, list):
            named = {entry.get("name"): entry.get("template") for entry in found}
            found = named.get("default")
        if isinstance(found, str):
            return found
    raise UserError(f"model.path: {folder} has no chat template (chat_template.jinja, or in tokenizer_config.json)")


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    return environment


def _tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    # jinja2's own filter escapes HTML; templates are written for plain JSON.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
