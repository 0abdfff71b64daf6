"""A byte-level BPE tokenizer made from a list of words, in the files of a published Qwen2 tokenizer.

Merges are learned from the words, the most frequent pair first (P. Gage, 1994; R. Sennrich et al., 2016), until each
word is one token. Qwen's prompt template is among the words, so that it has 34 tokens before the prompt as with
Qwen's own vocabulary; any other text is spelled in bytes.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

from qwenimg.common.prompts.vocabulary import REGEX, byte_symbols

Pair = tuple[str, str]

TEMPLATE_WORDS = (
    "system", "Describe", " the", " image", " by", " detailing", " color", " shape", " size", " texture",
    " quantity", " text", " spatial", " relationships", " of", " objects", " and", " background", "user", "assistant",
)  # fmt: skip
SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip


@dataclass(frozen=True)
class Vocabulary:
    """Token ids without the special tokens, which follow, and the merges in order."""

    ids: dict[str, int]
    merges: list[Pair]

    @property
    def special_ids(self) -> dict[str, int]:
        return {token: len(self.ids) + i for i, token in enumerate(SPECIAL)}

    @property
    def size(self) -> int:
        return len(self.ids) + len(SPECIAL)


@cache
def learn(words: tuple[str, ...]) -> Vocabulary:
    """The vocabulary in which each of `words` (with its leading space, if it has one) is one token."""
    symbols = byte_symbols()
    spelled = [[symbols[byte] for byte in word.encode()] for word in (*TEMPLATE_WORDS, *words)]
    merges: list[Pair] = []
    while counts := Counter(pair for word in spelled for pair in pairwise(word)):
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        merges.append(best)
        spelled = [merged(word, best) for word in spelled]
    tokens = dict.fromkeys([*symbols, *("".join(pair) for pair in merges)])  # two pairs may spell one token
    return Vocabulary({token: i for i, token in enumerate(tokens)}, merges)


def merged(word: list[str], pair: Pair) -> list[str]:
    """`word` with every occurrence of `pair` as one symbol."""
    result: list[str] = []
    for symbol in word:
        if result and (result[-1], symbol) == pair:
            result[-1] += symbol
        else:
            result.append(symbol)
    return result


def spelled(word: str) -> str:
    """`word` as a token is written in the vocabulary."""
    symbols = byte_symbols()
    return "".join(symbols[byte] for byte in word.encode())


def files(vocabulary: Vocabulary) -> dict[str, bytes]:
    """The tokenizer's files by name."""
    lines = ["#version: 0.2", *(f"{a} {b}" for a, b in vocabulary.merges)]
    return {
        "tokenizer.json": _json(tokenizer_json(vocabulary)),
        "tokenizer_config.json": _json(tokenizer_config(vocabulary)),
        "vocab.json": _json(vocabulary.ids),
        "merges.txt": ("\n".join(lines) + "\n").encode(),
    }


def _json(value: object) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=1) + "\n").encode()


def _options(token: str) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"content": token, **flags}


def tokenizer_config(vocabulary: Vocabulary) -> dict[str, Any]:
    """tokenizer_config.json."""
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {str(i): _options(token) for token, i in vocabulary.special_ids.items()},
        "additional_special_tokens": list(SPECIAL[1:]),
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 131072,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }


def tokenizer_json(vocabulary: Vocabulary) -> dict[str, Any]:
    """tokenizer.json, in the form of the published files."""
    split = {"type": "Split", "pattern": {"Regex": REGEX}, "behavior": "Isolated", "invert": False}
    as_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, **_options(token)} for token, i in vocabulary.special_ids.items()],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, as_bytes]},
        "post_processor": as_bytes,
        "decoder": as_bytes,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary.ids,
            "merges": [list(pair) for pair in vocabulary.merges],
        },
    }
