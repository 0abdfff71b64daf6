"""Files of T5's tokenizer: trained by SentencePiece at test time, or written by hand for what it would not write."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from support.scripts import corpus

PAD, EOS, UNK = ("<pad>", 0.0, 3), ("</s>", 0.0, 3), ("<unk>", 0.0, 2)


@cache
def trained(rule: str = "nmt_nfkc", size: int = 900) -> bytes:
    """A model like T5's: its special tokens, and the table of characters that `rule` names."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus(150)),
        model_writer=model,
        vocab_size=size,
        model_type="unigram",
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        normalization_rule_name=rule,
        character_coverage=0.9995,  # some characters are unknown
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def processor(raw: bytes) -> Any:
    """SentencePiece's own reader of the model."""
    import sentencepiece

    return sentencepiece.SentencePieceProcessor(model_proto=raw)


def write_spiece(folder: Path, raw: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "spiece.model").write_bytes(raw)
    return folder


def hugging_face(raw: bytes) -> Any:
    """transformers' tokenizer with the pieces of this model and the table of characters in it."""
    from transformers import T5Tokenizer

    model = processor(raw)
    pieces = [(model.id_to_piece(i), model.get_score(i)) for i in range(model.get_piece_size())]
    extra = [(f"<extra_id_{i}>", 0.0) for i in reversed(range(100))]
    return T5Tokenizer(vocab=[*pieces, *extra], _spm_precompiled_charsmap=charsmap(raw))


def write_tokenizer_json(folder: Path, raw: bytes) -> Path:
    """The folder that transformers saves."""
    hugging_face(raw).save_pretrained(folder)
    return folder


def older(parts: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer.json as transformers 4 converted it."""
    blanks: list[dict[str, Any]] = [
        {"type": "Strip", "strip_left": False, "strip_right": True},
        {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"},
    ]
    added = [
        token | ({"lstrip": True, "rstrip": True} if "extra" in token["content"] else {})
        for token in parts["added_tokens"]
    ]
    return parts | {
        "normalizer": {"type": "Sequence", "normalizers": [parts["normalizer"], *blanks]},
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
        "truncation": {"direction": "Right", "max_length": 512, "strategy": "LongestFirst", "stride": 0},
        "padding": {
            "strategy": {"Fixed": 512},
            "direction": "Right",
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<pad>",
        },
        "added_tokens": added,
        "model": {key: value for key, value in parts["model"].items() if key != "byte_fallback"},
    }


def tokenizer_json(folder: Path) -> dict[str, Any]:
    parts: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    return parts


# By hand


def varint(value: int) -> bytes:
    raw = b""
    while value > 127:
        raw += bytes([value & 127 | 128])
        value >>= 7
    return raw + bytes([value])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def message(field: int, raw: bytes, size: int | None = None) -> bytes:
    """A field of bytes, which claims `size` of them."""
    return varint(field << 3 | 2) + varint(len(raw) if size is None else size) + raw


def piece(text: str | bytes, score: float, type: int = 1) -> bytes:
    raw = text if isinstance(text, bytes) else text.encode()
    kind = b"" if type == 1 else number(3, type)
    return message(1, message(1, raw) + varint(2 << 3 | 5) + struct.pack("<f", score) + kind)


def model(pieces: Iterable[tuple[str | bytes, float] | tuple[str | bytes, float, int]], *more: bytes) -> bytes:
    return b"".join(piece(*one) for one in (PAD, EOS, UNK, *pieces)) + b"".join(more)


def normalizer(table: bytes, *more: bytes) -> bytes:
    return message(3, message(1, b"nfkc") + message(2, table) + b"".join(more))


def charsmap(raw: bytes) -> bytes:
    """The table of characters of a model, found by the name of its rule in front of it."""
    at = raw.index(b"nfkc\x12") + len(b"nfkc\x12")
    size = shift = 0
    while True:
        byte, at = raw[at], at + 1
        size |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return raw[at : at + size]


def table(words: Iterable[int], texts: bytes, size: int | None = None) -> bytes:
    """A table of characters of these words of a trie."""
    trie = b"".join(struct.pack("<I", word) for word in words)
    return struct.pack("<I", len(trie) if size is None else size) + trie + texts
