"""The tokenizer: byte-level BPE over the warm start's own conversations, with ChatML's and the tool calls' markers.

Invariant: every string round-trips (all 256 bytes are in the alphabet), and every marker is one token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

PADDING = "<|endoftext|>"
SPECIAL = [PADDING, "<|im_start|>", "<|im_end|>"]
MARKERS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
MARKER = re.compile("|".join(re.escape(text) for text in SPECIAL + MARKERS))
LARGEST = 1024
"""Bound on the vocabulary; the tasks' words and file names need about 600 entries."""


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A byte BPE trained on `texts`; about a second for 2,000 conversations."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    trainer = trainers.BpeTrainer(
        vocab_size=LARGEST,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((part for text in texts for part in MARKER.split(text)), trainer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKERS])
    return tokenizer


def token_id(tokenizer: Tokenizer, marker: str) -> int:
    """The id of a marker. Raises KeyError when it is not one token."""
    found = tokenizer.token_to_id(marker)
    if found is None:
        raise KeyError(marker)
    return int(found)


def tokenizer_config() -> dict[str, Any]:
    """What tokenizer_config.json says besides tokenizer.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": PADDING,
        "model_max_length": 4096,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
    }
