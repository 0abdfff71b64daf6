"""T5's tokenizer: words to ids, by `tokenizer.json` or `spiece.model` of a model folder.

Unusual here:

- files are only data: normalizer, pre-tokenizer and model are T5's, built here (`unigram`), so a file cannot bring
  others;
- after the words comes `</s>`, and then `<pad>` up to a fixed length. Both are part of the conditioning;
- text that spells a special token, such as `</s>` or one of the hundred `<extra_id_0>`, becomes that token, as in
  transformers. The extra ones follow the pieces, counted backwards, and `spiece.model` does not name them;
- mT5 has a larger vocabulary with pieces for bytes, of which a character is made that has no piece.
"""

from __future__ import annotations

import os
import re
from base64 import b64decode
from binascii import Error as Base64Error
from dataclasses import replace
from pathlib import Path
from typing import Any

from qwenimg.common.base.safe_files import bad
from qwenimg.common.base.text import clean
from qwenimg.common.prompts.check import check_prompt
from qwenimg.common.prompts.prompt_tokens import PromptTokens
from qwenimg.common.prompts.spiece import read_pieces
from qwenimg.common.prompts.unigram import MAX_PIECES, SPACE, Pieces, build, checked, checked_table
from qwenimg.common.prompts.vocabulary import Form, check_ids, guarded, has, read_parts, refuse, shown

EOS, PAD = "</s>", "<pad>"
EXTRA = 100  # special tokens behind the pieces
MAX_ADDED = 1024


class T5Tokenizer:
    """A tokenizer with the ids of transformers' T5Tokenizer. Opened by `load`."""

    def __init__(self, pieces: Pieces) -> None:
        self.file = pieces.file
        self.largest_id = max(len(pieces.scores) - 1, *pieces.special.values())
        self._special, self._tokenizer = pieces.special, guarded(self.file, lambda: build(pieces))
        self.eos, self.pad = (self._special[token] for token in (EOS, PAD))
        longest_first = sorted(self._special, key=len, reverse=True)
        self._tokens = re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    def words(self, text: str) -> list[int]:
        """Return the ids of `text` without the end token. Raises UsageError as `check_prompt` does."""
        check_prompt(text)
        ids: list[int] = []
        for i, part in enumerate(self._tokens.split(text)):
            ids += [self._special[part]] if i % 2 else self._split(part)
        return ids

    def _split(self, text: str) -> list[int]:
        """Return the ids of `text`, in which special tokens are plain text."""
        return guarded(self.file, lambda: self._tokenizer.encode(text, add_special_tokens=False).ids)

    def padded(self, text: str, length: int) -> PromptTokens:
        """Return the ids of `text` with the end token, padded or cut to `length`; the end token stays. Raises
        UsageError as `check_prompt` does."""
        words = self.words(text)
        ids = [*words[: length - 1], self.eos]
        return PromptTokens((*ids, *[self.pad] * (length - len(ids))), max(0, len(words) + 1 - length))

    def check_vocabulary(self, size: int) -> None:
        """Check that each id has a row in an embedding table of `size` rows. Raises ModelError."""
        if self.largest_id >= size:
            fault = f"has the token id {self.largest_id}, but the text encoder has {size} embeddings"
            raise bad(self.file, f"{fault}: use the tokenizer of this text encoder")


def load(folder: Path) -> T5Tokenizer:
    """Load the tokenizer in `folder`. Raises ModelError if it is missing, broken, or not of T5's form."""
    file = folder / "tokenizer.json"
    pieces = _tokenizer_json(file) if os.path.lexists(file) else _spiece_model(folder / "spiece.model")
    for token in (EOS, PAD):
        if token not in pieces.special:
            refuse(pieces.file, f"has no special token '{token}'")
    return T5Tokenizer(pieces)


def _spiece_model(file: Path) -> Pieces:
    pieces = read_pieces(file)
    if pieces.bytes:  # mT5's has the extra ones itself
        return pieces
    extra = {f"<extra_id_{EXTRA - 1 - i}>": len(pieces.scores) + i for i in range(EXTRA)}
    scores = [*pieces.scores, *((text, 0.0) for text in extra)]
    return replace(pieces, scores=scores, special=extra | pieces.special)


# tokenizer.json


def _is_metaspace(part: Any) -> bool:
    """Return whether every word gets a `▁`. With the scheme "first", words after a special token would not."""
    options = {
        "type": ("Metaspace",),
        "replacement": (SPACE,),
        "str_rep": (SPACE,),
        "add_prefix_space": (True,),
        "prepend_scheme": ("always", "first"),
        "split": (True,),
    }
    given = part if isinstance(part, dict) else {}
    return has(part, "replacement", SPACE) and all(value in options.get(key, ()) for key, value in given.items())


def _is_pre_tokenizer(part: Any) -> bool:
    parts = part.get("pretokenizers") if has(part, "type", "Sequence") else None
    if isinstance(parts, list) and len(parts) == 2 and parts[0] == {"type": "WhitespaceSplit"}:
        part = parts[1]
    return _is_metaspace(part)


# Normalizers behind the table of characters, by which ids do not change: all blanks are dropped.
_BLANKS = (
    {"type": "Strip", "strip_left": False, "strip_right": True},
    {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": SPACE},
)


def _charsmap(part: Any) -> object:
    """Return the table of characters of a normalizer, or None if it has another form."""
    if has(part, "type", "Sequence"):
        parts = part.get("normalizers")
        if not isinstance(parts, list) or not parts or any(other not in _BLANKS for other in parts[1:]):
            return None
        part = parts[0]
    known = isinstance(part, dict) and part.keys() == {"type", "precompiled_charsmap"}
    return part["precompiled_charsmap"] if known and part["type"] == "Precompiled" else None


_FORM = Form(
    parts={
        "version": lambda part: part in (None, "1.0"),
        "truncation": lambda part: part is None or isinstance(part, dict),
        "padding": lambda part: part is None or isinstance(part, dict),
        "added_tokens": lambda part: isinstance(part, list) and len(part) <= MAX_ADDED,
        "normalizer": lambda part: isinstance(_charsmap(part), str),
        "pre_tokenizer": _is_pre_tokenizer,
        "post_processor": lambda part: part is None or isinstance(part, dict),
        "decoder": lambda part: part is None or isinstance(part, dict),
        "model": lambda part: isinstance(part, dict) and type(part.get("unk_id")) is int,
    },
    model={"type": ("Unigram",), "byte_fallback": (None, False, True)},
)


def _tokenizer_json(file: Path) -> Pieces:
    parts = read_parts(file, _FORM, frozenset({"vocab", "unk_id"}))
    model = parts["model"]
    rows = model.get("vocab")
    if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) == 2 for row in rows):
        refuse(file, "must have model.vocab, a list of pieces with their scores")
    if len(rows) > MAX_PIECES:
        refuse(file, f"has {len(rows)} pieces, at most {MAX_PIECES} are read")
    texts = checked(file, ((text, score) for text, score in rows))
    unknown = model["unk_id"]
    if not 0 <= unknown < len(texts):
        refuse(file, f"model.unk_id is {unknown}, of {len(texts)} pieces")
    has_bytes, known = model.get("byte_fallback") is True, {text for text, _ in texts}
    if has_bytes and any(f"<0x{byte:02X}>" not in known for byte in range(256)):
        refuse(file, "model.byte_fallback is true, without a piece for each byte")
    special = _added_tokens(file, parts["added_tokens"])
    ids = {text: id for id, (text, _) in enumerate(texts)}
    for text, id in special.items():
        if ids.get(text, -1 if id < len(texts) else id) != id:
            refuse(file, f"gives the special token '{clean(text, 40)}' the id {id}, which is another's")
    if ids.keys() <= special.keys() | {texts[unknown][0]}:
        refuse(file, "has no pieces")
    try:
        table = b64decode(str(_charsmap(parts["normalizer"])), validate=True)
    except (Base64Error, ValueError) as error:
        refuse(file, f"its table of characters (charsmap) {clean(error, 80)}")
    return Pieces(
        file=file,
        scores=texts,
        unknown=unknown,
        special=special,
        charsmap=checked_table(file, table),
        bytes=has_bytes,
    )


def _added_tokens(file: Path, entries: list[Any]) -> dict[str, int]:
    """Return the ids of added tokens by text. Blanks around them are dropped anyway."""
    special: dict[str, int] = {}
    for entry in entries:
        text = entry.get("content") if isinstance(entry, dict) else None
        if not isinstance(text, str) or not 0 < len(text) <= 256 or text in special:
            refuse(file, f"has an added token that is twice there, empty or too long ({shown(text)})")
        if entry.get("single_word", False) is not False:
            refuse(file, f"has single_word at the added token '{clean(text, 40)}'")
        special[text] = entry.get("id")
    check_ids(file, special)
    return special
