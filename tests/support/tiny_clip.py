"""Tiny CLIP text encoders and tokenizers in the files of published ones, made at test time."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from training import tokenizer

from qwenimg.common.prompts.vocabulary import byte_symbols
from support.tiny_model import randomise

BOS, EOS = "<|startoftext|>", "<|endoftext|>"
WORDS = (
    "a an the photo of red green blue circle square astronaut riding horse on in with cat dog big small word and ! !!"
    " , . ( ) : 's 't don é 红色 👍 1 2 3"
)
# ViT-L, OpenCLIP-H and bigG in small: odd widths, and more than one head.
KINDS: dict[str, dict[str, Any]] = {
    "ViT-L": {"hidden_size": 60, "intermediate_size": 88, "num_hidden_layers": 3, "num_attention_heads": 4},
    "OpenCLIP-H": {
        "hidden_size": 72,
        "intermediate_size": 104,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "hidden_act": "gelu",
        "projection_dim": 512,
    },
    "bigG": {
        "hidden_size": 80,
        "intermediate_size": 120,
        "num_hidden_layers": 5,
        "num_attention_heads": 5,
        "hidden_act": "gelu",
        "projection_dim": 52,
    },
}


@cache
def tiny_clip_vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """({token: id}, merges) in CLIP's order: bytes, bytes that end a word, merges, start and end token."""
    symbols = byte_symbols()
    words = [[symbols[byte] for byte in word.encode()] for word in WORDS.split()]
    words = [[*word[:-1], word[-1] + "</w>"] for word in words]
    merges: list[tuple[str, str]] = []
    while counts := Counter(pair for word in words for pair in pairwise(word)):
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        merges.append(best)
        words = [tokenizer.merged(word, best) for word in words]
    joined = ["".join(pair) for pair in merges]
    tokens = dict.fromkeys([*symbols, *(symbol + "</w>" for symbol in symbols), *joined, BOS, EOS])
    return {token: i for i, token in enumerate(tokens)}, merges


def write_tiny_clip_tokenizer(folder: Path, pad: str = EOS) -> None:
    """vocab.json, merges.txt and the two configurations of a published folder; OpenCLIP's `pad` is "!"."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab, merges = tiny_clip_vocabulary()
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]

    def added(content: str) -> dict[str, Any]:
        return {"content": content, "lstrip": False, "normalized": True, "rstrip": False, "single_word": False}

    special = {"bos_token": added(BOS), "eos_token": added(EOS), "unk_token": added(EOS)}
    config = {
        "add_prefix_space": False,
        **{name: {"__type": "AddedToken", **token} for name, token in special.items()},
        "do_lower_case": True,
        "errors": "replace",
        "model_max_length": 77,
        "pad_token": pad,
        "tokenizer_class": "CLIPTokenizer",
    }
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for name, value in (
        ("vocab.json", vocab),
        ("tokenizer_config.json", config),
        ("special_tokens_map.json", special | {"pad_token": pad}),
    ):
        (folder / name).write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


def tiny_clip(kind: str, seed: int = 5, projected: bool = False, **changes: Any) -> torch.nn.Module:
    """transformers' model of this kind with the tiny vocabulary, float32, nothing trivial in it; `projected`: with a
    projection, which bigG has anyway.

    `eos_token_id` is the wrong 2 of published configurations unless `changes` gives another.
    """
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    fields = {"vocab_size": len(tiny_clip_vocabulary()[0]), "eos_token_id": 2, "bos_token_id": 0}
    config = CLIPTextConfig(**(fields | KINDS[kind] | changes))
    model = (CLIPTextModelWithProjection if projected or kind == "bigG" else CLIPTextModel)(config)
    randomise(model, seed)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "embedding" in name:  # of the size that a token's state has
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return model.eval()
