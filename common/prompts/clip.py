"""CLIP's tokenizer: words to ids, by the files of a model folder or of another place on this machine.

Unusual here:

- Byte-level BPE whose last piece of a word ends in `</w>`; text is in lower case, white space is one blank.
- ViT-L pads with `<|endoftext|>`; the OpenCLIP encoders pad with "!" (id 0). As in transformers a padding token is a
  special token, so for OpenCLIP every "!" of a prompt is that token, and never part of a "!!" or of a word's end.
- Single files have no tokenizer. All published models have the same vocabulary of 49,408 tokens, so the tokenizer of
  any of them serves: `parts.clip_tokenizer` finds one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwenimg.common.base.safe_files import bad
from qwenimg.common.base.text import clean
from qwenimg.common.prompts.check import check_prompt
from qwenimg.common.prompts.prompt_tokens import PromptTokens
from qwenimg.common.prompts.vocabulary import (
    QWEN,
    Vocabulary,
    guarded,
    has,
    json_object,
    read_vocabulary,
    refuse,
    shown,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

EOS_PAD, OPEN_CLIP_PAD = "<|endoftext|>", "!"
_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
REGEX = r"<\|startoftext\|>|<\|endoftext\|>|" + _WORDS
_ROLES = {"bos_token": "<|startoftext|>", "eos_token": EOS_PAD, "unk_token": EOS_PAD, "pad_token": EOS_PAD}
_NORMALIZER = {
    "type": "Sequence",
    "normalizers": [
        {"type": "NFC"},
        {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "},
        {"type": "Lowercase"},
    ],
}
_SPLITS = (REGEX, _WORDS)  # of transformers 5 and 4: the same ids


def _is_pre_tokenizer(part: Any) -> bool:
    parts = part.get("pretokenizers") if has(part, "type", "Sequence") else None
    if not isinstance(parts, list) or len(parts) != 2:
        return False
    splits = [{"type": "Split", "pattern": {"Regex": r}, "behavior": "Removed", "invert": True} for r in _SPLITS]
    as_bytes = has(parts[1], "type", "ByteLevel") and has(parts[1], "add_prefix_space", False)
    return parts[0] in splits and as_bytes and parts[1].get("use_regex", True) is True


# `weighted` adds start and end token, not a post-processor.
_FORM = replace(
    QWEN,
    parts={
        **QWEN.parts,
        "truncation": lambda part: part is None or isinstance(part, dict),
        "padding": lambda part: part is None or isinstance(part, dict),
        "normalizer": lambda part: part == _NORMALIZER,
        "pre_tokenizer": _is_pre_tokenizer,
        "post_processor": lambda part: part is None or isinstance(part, dict),
    },
    model={**QWEN.model, "unk_token": (EOS_PAD,), "end_of_word_suffix": ("</w>",)},
    suffix="</w>",
)


@dataclass(frozen=True)
class Special:
    """A special token. `normalized`: it is matched in the text in lower case, not as it was typed."""

    content: str
    normalized: bool


class CLIPTokenizer:
    """A tokenizer with the ids of transformers' CLIPTokenizer. Opened by `load`."""

    def __init__(self, vocabulary: Vocabulary, special: dict[str, Special]) -> None:
        self.file = vocabulary.file
        self.largest_id = max(vocabulary.ids.values())
        self.bos, self.eos, _, self.pad = (vocabulary.ids[special[role].content] for role in _ROLES)
        self._tokenizer = guarded(self.file, lambda: _build(vocabulary, special))

    def words(self, text: str) -> list[int]:
        """Return the ids of `text` without start and end token. Raises UsageError as `check_prompt` does."""
        check_prompt(text)
        return guarded(self.file, lambda: self._tokenizer.encode(text, add_special_tokens=False).ids)

    def padded(self, text: str, length: int) -> PromptTokens:
        """Return the ids of `text` with start and end token, padded or cut to `length`; the end token stays. Raises
        UsageError as `check_prompt` does."""
        words = self.words(text)
        ids = [self.bos, *words[: length - 2], self.eos]
        return PromptTokens((*ids, *[self.pad] * (length - len(ids))), max(0, len(words) + 2 - length))

    def check_vocabulary(self, size: int) -> None:
        """Check that the largest id is the last row of an embedding table of `size` rows. Raises ModelError."""
        if self.largest_id != size - 1:
            fault = f"has token ids up to {self.largest_id}, but the text encoder has {size} embeddings"
            raise bad(self.file, f"{fault}: use the tokenizer of this text encoder")


def load(folder: Path, pad: str | None = None) -> CLIPTokenizer:
    """Load the tokenizer in `folder`. Raises ModelError if it is missing, broken, or not of CLIP's form.

    `pad`: the text encoder's padding token, EOS_PAD or OPEN_CLIP_PAD, for the folder of another model."""
    vocabulary = read_vocabulary(folder, _FORM)
    special = _read_special(folder, vocabulary)
    if pad is not None:
        special["pad_token"] = Special(pad, False)
    for role, token in special.items():
        if token.content not in vocabulary.ids:
            refuse(vocabulary.file, f"has no token '{clean(token.content, 40)}', which is to be its {role}")
    return CLIPTokenizer(vocabulary, special)


# Special tokens


def _read_special(folder: Path, vocabulary: Vocabulary) -> dict[str, Special]:
    """Return the special token of each role: of tokenizer_config.json, else of special_tokens_map.json, else CLIP's.
    Raise ModelError for any other added token, since the text encoder has no embedding for it."""
    config, others = (_object(folder / name) for name in ("tokenizer_config.json", "special_tokens_map.json"))
    file = folder / "tokenizer_config.json" if config else vocabulary.file
    if config.get("tokenizer_class") not in (None, "CLIPTokenizer", "CLIPTokenizerFast", "PreTrainedTokenizerFast"):
        refuse(file, f"tokenizer_class is {shown(config['tokenizer_class'])}, not CLIPTokenizer")
    listed = dict.fromkeys(_object(folder / "added_tokens.json"), False) | _listed(file, vocabulary, config)
    special = {}
    for role, default in _ROLES.items():
        entry = config.get(role) or others.get(role) or default
        if isinstance(entry, str):
            entry = {"content": entry, "normalized": listed.get(entry, False)}
        special[role] = _token(file, entry)
    known = {token.content for token in special.values()}
    for content in listed:
        if content not in known:
            refuse(file, f"has an added token '{clean(content, 40)}', which CLIP does not")
    return special


def _listed(file: Path, vocabulary: Vocabulary, config: dict[str, Any]) -> dict[str, bool]:
    """Return {content: normalized} of the added tokens in tokenizer.json and tokenizer_config.json."""
    decoder = config.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict):
        refuse(file, "added_tokens_decoder is not an object")
    tokens = [_token(file, entry) for entry in (*vocabulary.added_entries, *decoder.values())]
    return {token.content: token.normalized for token in tokens}


def _token(file: Path, entry: Any) -> Special:
    content = entry.get("content") if isinstance(entry, dict) else None
    if not isinstance(content, str) or not 0 < len(content) <= 256:
        refuse(file, f"has a special token that is empty, too long or no text ({shown(content)})")
    if any(entry.get(option, False) is not False for option in ("lstrip", "rstrip", "single_word")):
        refuse(file, f"has lstrip, rstrip or single_word at the special token '{clean(content, 40)}'")
    return Special(content, entry.get("normalized") is True)


def _object(file: Path) -> dict[str, Any]:
    return json_object(file) if os.path.lexists(file) else {}


def _build(vocabulary: Vocabulary, special: dict[str, Special]) -> Tokenizer:
    """Return CLIP's pipeline with these tokens."""
    from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers
    from tokenizers.models import BPE

    unknown = special["unk_token"].content
    bpe = BPE(vocab=vocabulary.ids, merges=vocabulary.merges, end_of_word_suffix="</w>", unk_token=unknown)
    tokenizer = Tokenizer(bpe)
    one_blank = normalizers.Replace(Regex(r"\s+"), " ")
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), one_blank, normalizers.Lowercase()])
    split = pre_tokenizers.Split(Regex(REGEX), behavior="removed", invert=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    normalized = {token.content: token.normalized for token in special.values()}  # of two roles, the last one's
    tokenizer.add_special_tokens([AddedToken(content, normalized=flag) for content, flag in normalized.items()])
    return tokenizer
