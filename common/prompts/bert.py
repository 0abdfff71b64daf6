"""BERT's tokenizer: words to ids, by `vocab.txt` or `tokenizer.json` of a model folder.

Unusual here:

- each Chinese character, and each sign, is a word of its own. A word is the longest token that it begins with, then the
  longest tokens of its rest, which begin with `##`; if there is none for a part, the whole word is one unknown token;
- by the options in `tokenizer_config.json` text is in lower case and without accents;
- text that spells a special token, such as `[SEP]`, becomes that token, as in transformers.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwenimg.common.base.safe_files import bad
from qwenimg.common.base.text import clean
from qwenimg.common.prompts.check import check_prompt
from qwenimg.common.prompts.prompt_tokens import PromptTokens
from qwenimg.common.prompts.vocabulary import Form, check_ids, guarded, has, json_object, read_file, read_parts, refuse

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CLS, SEP, PAD, UNKNOWN, MASK = SPECIAL = ("[CLS]", "[SEP]", "[PAD]", "[UNK]", "[MASK]")
MAX_TOKENS = 2**18
MAX_WORD = 100  # characters; a longer word is unknown
_OPTIONS = {"do_lower_case": True, "tokenize_chinese_chars": True, "strip_accents": None}
_CLASSES = (None, "BertTokenizer", "BertTokenizerFast", "PreTrainedTokenizerFast")

_FORM = Form(
    parts={
        "version": lambda part: part in (None, "1.0"),
        "truncation": lambda part: part is None or isinstance(part, dict),
        "padding": lambda part: part is None or isinstance(part, dict),
        "added_tokens": lambda part: isinstance(part, list),
        "normalizer": lambda part: has(part, "type", "BertNormalizer") and has(part, "clean_text", True),
        "pre_tokenizer": lambda part: part == {"type": "BertPreTokenizer"},
        "post_processor": lambda part: part is None or isinstance(part, dict),
        "decoder": lambda part: part is None or isinstance(part, dict),
        "model": lambda part: isinstance(part, dict) and isinstance(part.get("vocab"), dict),
    },
    model={
        "type": ("WordPiece",),
        "unk_token": (UNKNOWN,),
        "continuing_subword_prefix": ("##",),
        "max_input_chars_per_word": (MAX_WORD,),
    },
)


class BertTokenizer:
    """A tokenizer with the ids of transformers' BertTokenizer. Opened by `load`."""

    def __init__(self, file: Path, ids: dict[str, int], options: dict[str, Any]) -> None:
        self.file, self.largest_id = file, max(ids.values())
        self.cls, self.sep, self.pad = (ids[token] for token in (CLS, SEP, PAD))
        self._tokenizer = guarded(file, lambda: _build(ids, options))

    def words(self, text: str) -> list[int]:
        """Return the ids of `text` without start and end token. Raises UsageError as `check_prompt` does."""
        check_prompt(text)
        return guarded(self.file, lambda: self._tokenizer.encode(text, add_special_tokens=False).ids)

    def padded(self, text: str, length: int) -> PromptTokens:
        """Return the ids of `text` with start and end token, padded or cut to `length`; the end token stays. Raises
        UsageError as `check_prompt` does."""
        words = self.words(text)
        ids = [self.cls, *words[: length - 2], self.sep]
        pads = length - len(ids)
        return PromptTokens((*ids, *[self.pad] * pads), max(0, len(words) + 2 - length), pads)

    def check_vocabulary(self, size: int) -> None:
        """Check that each id has a row in an embedding table of `size` rows. Raises ModelError."""
        if self.largest_id >= size:
            fault = f"has the token id {self.largest_id}, but the text encoder has {size} embeddings"
            raise bad(self.file, f"{fault}: use the tokenizer of this text encoder")


def load(folder: Path) -> BertTokenizer:
    """Load the tokenizer in `folder`. Raises ModelError if it is missing, broken, or not of BERT's form."""
    file, config = folder / "tokenizer.json", _config(folder / "tokenizer_config.json")
    if os.path.lexists(file):
        parts = read_parts(file, _FORM, frozenset({"vocab"}))
        ids: dict[str, Any] = parts["model"]["vocab"]
        form = parts["normalizer"]
        given = (form.get("lowercase"), form.get("handle_chinese_chars"), form.get("strip_accents"))
        options = dict(zip(_OPTIONS, given, strict=True))
    else:
        file = folder / "vocab.txt"
        ids, options = _vocab_txt(file), {name: config.get(name, value) for name, value in _OPTIONS.items()}
    for name, value in options.items():
        if not isinstance(value, bool) and (value is not None or name != "strip_accents"):
            refuse(file, f"its option {name} is {clean(value, 40)!r}, neither true nor false")
    check_ids(file, ids)
    for token in SPECIAL[:-1]:
        if token not in ids:
            refuse(file, f"has no token '{token}'")
    return BertTokenizer(file, ids, options)


def _config(file: Path) -> dict[str, Any]:
    config = json_object(file) if os.path.lexists(file) else {}
    if (kind := config.get("tokenizer_class")) not in _CLASSES:
        refuse(file, f"tokenizer_class is '{clean(kind, 40)}', not BertTokenizer")
    return config


def _vocab_txt(file: Path) -> dict[str, int]:
    try:
        lines = read_file(file).decode("utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        refuse(file, f"is not UTF-8 at byte {error.start}")
    if len(lines) > MAX_TOKENS:
        refuse(file, f"has {len(lines)} tokens, at most {MAX_TOKENS} are read")
    return {line.removesuffix("\r"): id for id, line in enumerate(lines)}


def _build(ids: dict[str, int], options: dict[str, Any]) -> Tokenizer:
    """Return BERT's pipeline with these tokens."""
    from tokenizers import Tokenizer, normalizers, pre_tokenizers
    from tokenizers.models import WordPiece

    tokenizer = Tokenizer(WordPiece(ids, unk_token=UNKNOWN, max_input_chars_per_word=MAX_WORD))
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=options["tokenize_chinese_chars"],
        strip_accents=options["strip_accents"],
        lowercase=options["do_lower_case"],
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens([token for token in SPECIAL if token in ids])
    return tokenizer
