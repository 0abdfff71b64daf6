"""A tokenizer of 541 tokens in the files of a published Qwen2 tokenizer, made in 0.1 s.

Its merges are learned from the words below until each is one token. So Qwen's prompt template has 34 tokens before
the prompt, as with Qwen's own vocabulary, and prompts about coloured shapes are short. The files are written by
hand, because importing transformers takes seconds; `test_tokenizers.py` compares them with transformers.
"""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from training import tokenizer

Pair = tuple[str, str]

WORDS = (
    "system Describe user assistant a the by of and on in is to with left right above below picture draw top bottom"
    " Ġthe Ġimage Ġby Ġdetailing Ġcolor Ġshape Ġsize Ġtexture Ġquantity Ġtext Ġspatial Ġrelationships Ġof Ġobjects"
    " Ġand Ġbackground Ġa Ġan Ġon Ġin Ġis Ġto Ġwith Ġleft Ġright Ġabove Ġbelow Ġpicture Ġtop Ġbottom Ġcenter"
    " Ġcircle Ġsquare Ġtriangle Ġstar Ġdiamond Ġcross Ġring Ġheart Ġred Ġgreen Ġblue Ġyellow Ġorange Ġpurple"
    " Ġpink Ġbrown Ġblack Ġwhite Ġgray Ġsmall Ġbig Ġlarge 一个 红色 绿色 蓝色 黄色 的 圆 方形 三角形 星 心 在 左边"
    " 右边 上面 下面 背景"
)
SPECIAL = tokenizer.SPECIAL
BYTES = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # those that stand for themselves
OTHERS = [byte for byte in range(256) if byte not in BYTES]
SYMBOL = {byte: chr(byte) for byte in BYTES} | {byte: chr(0x100 + i) for i, byte in enumerate(OTHERS)}


@cache
def tiny_vocabulary() -> tuple[dict[str, int], list[Pair]]:
    """({token: id} without the special tokens, merges): 256 bytes, then one token for each merge."""
    words = [[SYMBOL[byte] for byte in word.replace("Ġ", " ").encode()] for word in WORDS.split()]
    merges: list[Pair] = []
    while counts := Counter(pair for word in words for pair in pairwise(word)):
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        merges.append(best)
        words = [tokenizer.merged(word, best) for word in words]
    tokens = [*SYMBOL.values(), *("".join(pair) for pair in merges)]
    return {token: i for i, token in enumerate(tokens)}, merges


def tiny_special_ids() -> dict[str, int]:
    """The ids of the special tokens, which follow the vocabulary."""
    return {token: len(tiny_vocabulary()[0]) + i for i, token in enumerate(SPECIAL)}


def write_tiny_tokenizer(folder: Path, style: Literal["json", "vocab+merges", "both"] = "both") -> None:
    """Write the tokenizer into `folder`: tokenizer.json, or vocab.json with merges.txt, or both, and its config."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab, merges = tiny_vocabulary()
    _write(folder / "tokenizer_config.json", tokenizer_config())
    if style != "vocab+merges":
        _write(folder / "tokenizer.json", tokenizer_json())
    if style != "json":
        _write(folder / "vocab.json", vocab)
        _write(folder / "added_tokens.json", tiny_special_ids())
        lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
        (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def tokenizer_config() -> dict[str, Any]:
    """tokenizer_config.json."""
    return tokenizer.tokenizer_config(tokenizer.Vocabulary(*tiny_vocabulary()))


def tokenizer_json() -> dict[str, Any]:
    """tokenizer.json, in the form of the published files."""
    return tokenizer.tokenizer_json(tokenizer.Vocabulary(*tiny_vocabulary()))
